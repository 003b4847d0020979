from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from evap.engine.interface import Text
from evap.engine.tokenizer import HfText, load_text
from evap.errors import ContextOverflow, InvalidRequest, StartupError
from tests.engine import small_tokenizers as small

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The capital of France? 삼"}]
#: In the words of each tokenizer: special tokens in the text, BOS written by the template.
TEMPLATE = "<s>{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|user|> "


def load(tokenizer: Tokenizer, path: Path, template: str | None = TEMPLATE, **config: object) -> HfText:
    return load_text(small.save(tokenizer, path, template, **config))


@pytest.mark.parametrize("name", sorted(small.ALL))
def test_ids_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    text = load(small.ALL[name](), tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for chat in (CHAT, [*CHAT, {"role": "user", "content": "<|im_end|> </s>  <mask> tricks\n\n"}]):
        for _ in range(2):
            expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            assert text.chat_ids(chat, {}) == expected
    for prompt in ("The quick brown fox", "", " ", "<|im_end|>hello", "\n\nx"):
        assert text.encode(prompt) == theirs(prompt)["input_ids"]
        ids = text.encode(prompt)
        for skip in (True, False):
            assert text.decode(ids, skip_special=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_it_is_a_text(tmp_path: Path) -> None:
    text: Text = load(small.byte_level(), tmp_path)
    assert text.fragments is not None
    assert text.detokenizer(stop=("x",)).push(text.encode("abxc")) == "ab"


def test_bos_is_not_doubled(tmp_path: Path) -> None:
    text = load(small.llama2(), tmp_path, "<s>{{ messages[0].content }}")
    bos = 1
    assert text.encode("hello")[0] == bos
    assert text.encode("<s>hello").count(bos) == 1
    assert text.chat_ids([{"content": "hello"}], {}).count(bos) == 1
    assert text.encode("") == [bos]


def test_sizes_and_ends(tmp_path: Path) -> None:
    text = load(small.byte_level(), tmp_path, eos_token="<|endoftext|>")
    assert text.vocab_size == 600  # of the model's config, larger than the tokenizer's
    assert text.eos_ids == {0, 2}
    assert text.has_template
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 700, "eos_token_id": 5}}))
    text = load_text(tmp_path)
    assert text.vocab_size == 700
    assert text.eos_ids == {0, 1, 2, 5}


def test_bytes_of_tokens(tmp_path: Path) -> None:
    text = load(small.byte_level(), tmp_path)
    ids = text.encode("삼ď x")
    assert b"".join(map(text.token_bytes, ids)) == "삼ď x".encode()
    assert text.token_bytes(2) == b"<|im_end|>"
    assert text.token_bytes(599) == b""
    pieces = load(small.word_piece(), tmp_path)
    assert pieces.token_bytes(pieces.encode("the")[0]) == b"the"


def test_no_table_is_said_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = load(small.word_piece(), tmp_path)
    assert text.fragments is None
    assert "WordPiece" in text.fragments_off
    assert "fragment table" in caplog.text


@pytest.mark.parametrize("method", ["encode", "chat_ids"])
def test_a_prompt_beyond_the_context(tmp_path: Path, method: str) -> None:
    text = load(small.byte_level(), tmp_path)
    text.limit_tokens = 100

    def ids(prompt: str) -> list[int]:
        if method == "encode":
            return text.encode(prompt)
        return text.chat_ids([{"role": "user", "content": prompt}], {})

    assert ids("the dog")
    field = "prompt" if method == "encode" else "messages"
    with pytest.raises(ContextOverflow, match="room for 100") as refused:
        ids("the dog and " * 50)
    assert refused.value.param == field
    text._tokenizer = text._template = None  # type: ignore[assignment]
    text.token_cache = None  # type: ignore[assignment]
    with pytest.raises(ContextOverflow, match="more than"):  # without being rendered or tokenized
        ids("the dog and " * 5000)


def test_lone_surrogates(tmp_path: Path) -> None:
    text = load(small.byte_level(), tmp_path)
    for bad in ("\ud83d", "\udc00\ud83d", "ok \udfff"):
        with pytest.raises(InvalidRequest):
            text.encode(bad)
        with pytest.raises(InvalidRequest):
            text.chat_ids([{"role": "user", "content": bad}], {})


def test_a_base_model_has_no_chat(tmp_path: Path) -> None:
    text = load(small.byte_level(), tmp_path, None)
    assert not text.has_template
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        text.chat_ids(CHAT, {})


def test_truncation_and_padding_of_the_file_are_not_used(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(small.byte_level().to_str())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    text = load(tokenizer, tmp_path)
    assert text.encode("the quick brown fox jumps") == small.byte_level().encode("the quick brown fox jumps").ids


@pytest.mark.parametrize("content", [None, "{}", "not json", '{"model": {"type": "?"}}'])
def test_a_broken_directory(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError) as caught:
        load_text(tmp_path)
    assert caught.value.remedy


def test_a_large_prompt_leaves_the_interpreter_to_others(tmp_path: Path) -> None:
    """vllm#24910: while a worker thread is inside the tokenizer, the loop's thread runs."""
    text = load(small.byte_level(), tmp_path)
    turns = 0
    overlapped: list[bool] = []

    class Watched:
        def encode_batch_fast(self, texts: list[str], **args: Any) -> Any:
            before = turns
            result = tokenizer.encode_batch_fast(texts, **args)
            overlapped.append(turns > before)
            return result

    tokenizer, text.token_cache._tokenizer = text.token_cache._tokenizer, Watched()  # type: ignore[assignment]
    prompt = "".join(f"the quick brown fox {i} and so on, " for i in range(20_000))
    worker = threading.Thread(target=text.chat_ids, args=([{"role": "user", "content": prompt}], {}))
    worker.start()
    while worker.is_alive():
        turns += 1
    assert any(overlapped)
    assert len(overlapped) > 1


def test_chats_are_looked_up_by_their_parts(tmp_path: Path) -> None:
    text = load(small.qwen(), tmp_path)
    first = text.chat_ids(CHAT, {})
    used = text.token_cache.used_bytes
    assert used > 0
    assert text.chat_ids(CHAT, {}) == first
    assert text.token_cache.used_bytes == used
