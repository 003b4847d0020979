from __future__ import annotations

import threading

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from evap.engine import token_cache
from evap.engine.token_cache import Splitter, TokenCache
from evap.errors import ContextOverflow, InvalidRequest
from tests.engine import small_tokenizers as small

CACHES = {name: TokenCache(make(), 1 << 20) for name, make in small.ALL.items()}

#: What can go wrong: special tokens and parts of them, white space of all kinds beside them, characters that compose.
TRICKY = st.lists(
    st.sampled_from([
        "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "start|>", "<mask>", "<s>", "</s>", "<|user|>",
        "<|end|>", "<tool_call>", "<a b>", "[UNK]", "[SEP]", "fox", "foxy", "<<s>", " ", "  ", "\n", "\r\n", "\n\n",
        "\t", "\u00a0", "a", "A b", "the dog", "it's", "'s", "1", "12", "é", "e", "\u0301", "삼", "한국어 글", "你好。",
        "あ\nい", "!", ".\n", "x\ny", "👩‍👩‍👧", "\u2581", "\u2581\u2581", "", "\x00",
    ]),
    max_size=14,
).map("".join)  # fmt: skip


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@given(st.sampled_from(sorted(small.ALL)), TRICKY)
@example("phi", "a<|user|>  \n b <|end|> <|end|>  ")
@example("metaspace", "<s>a b</s> c")
@example("roberta", "a  <mask> b fox foxy fox")
def test_ids_are_those_of_the_plain_tokenizer(name: str, text: str) -> None:
    tokenizer = small.ALL[name]()
    for _ in range(2):  # unknown, then known
        assert CACHES[name].ids(text) == plain(tokenizer, text)


@given(st.sampled_from(sorted(small.ALL)), TRICKY)
def test_long_texts_may_be_cut(name: str, text: str) -> None:
    tokenizer = small.ALL[name]()
    if name == "qwen":
        tokenizer = small.qwen_cuttable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "_PIECE", 3)
        patch.setattr(token_cache, "_WINDOW", 7)
        assert TokenCache(tokenizer, 1 << 20).ids(text) == plain(tokenizer, text)


#: Everything that a regular expression of a pre-tokenizer tells apart.
CLASSES = st.text(st.sampled_from("aB 1\n\r\t.!'s\u0301é삼你あ\u00a0\u2028/_—"), max_size=30)


@given(st.sampled_from(["byte_level", "qwen"]), CLASSES)
def test_cuts_are_where_the_pre_tokenizer_cuts(name: str, text: str) -> None:
    tokenizer = small.ALL[name]()
    for found in token_cache._CUT.finditer(text):
        left, right = text[: found.end()], text[found.end() :]
        assert plain(tokenizer, left) + plain(tokenizer, right) == plain(tokenizer, text)


@pytest.mark.parametrize("pattern", sorted(token_cache._KNOWN_SPLITS))
def test_cuts_are_exact_for_each_known_split(pattern: str) -> None:
    from tokenizers import Regex

    split = pre_tokenizers.Split(Regex(pattern), "isolated")

    @given(CLASSES)
    def compare(text: str) -> None:
        whole = [w for w, _ in split.pre_tokenize_str(text)]
        for found in token_cache._CUT.finditer(text):
            parts = [w for part in (text[: found.end()], text[found.end() :]) for w, _ in split.pre_tokenize_str(part)]
            assert parts == whole

    compare()


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<a b>"),
        AddedToken("x", rstrip=True),
        AddedToken("x", lstrip=True),
        AddedToken("x", single_word=True),
    ],
)
def test_added_tokens_of_normalized_text_may_forbid_cuts(token: AddedToken) -> None:
    tokenizer = Tokenizer.from_str(small.qwen_cuttable().to_str())
    text = "the dog " * 3000
    assert len(Splitter(tokenizer).split(text) or ()) > 1
    tokenizer.add_tokens([token])
    assert len(Splitter(tokenizer).split(text) or ()) == 1


def test_a_conversation_sent_again_is_looked_up() -> None:
    calls: list[list[str]] = []
    tokenizer = small.qwen()
    cache = TokenCache(tokenizer, 1 << 20)
    encode = cache._encode

    def counting(texts: list[str]) -> list[token_cache.Ids]:
        calls.append(texts)
        return encode(texts)

    cache._encode = counting  # type: ignore[method-assign]
    turns = [f"<|im_start|>user\nquestion {i}<|im_end|>\n" for i in range(20)]
    cache.ids("".join(turns))
    calls.clear()
    text = "".join([*turns, "<|im_start|>user\nnew one<|im_end|>\n"])
    assert cache.ids(text) == plain(tokenizer, text)
    assert calls == [["user\nnew one"]]


def test_a_long_text_that_grows_is_looked_up_up_to_its_last_piece() -> None:
    tokenizer = small.byte_level()
    cache = TokenCache(tokenizer, 1 << 20)
    text = "the quick brown fox jumps over the lazy dog. " * 1000
    cache.ids(text)
    encoded: list[int] = []
    encode = cache._encode

    def counting(texts: list[str]) -> list[token_cache.Ids]:
        encoded.extend(map(len, texts))
        return encode(texts)

    cache._encode = counting  # type: ignore[method-assign]
    assert cache.ids(text + "more text.") == plain(tokenizer, text + "more text.")
    assert sum(encoded) < 3 * token_cache._PIECE


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    cache = TokenCache(small.byte_level(), 20_000)
    for i in range(500):
        cache.ids(f"some text with the number {i}")
        cache.ids("kept in use")
        assert cache.used_bytes <= 20_000
    kept = list(cache._known)
    assert kept[-1] == "kept in use"
    assert "some text with the number 0" not in kept
    assert cache.used_bytes == sum(token_cache._size(p, ids) for p, ids in cache._known.items())


def test_one_text_does_not_drive_out_all_others() -> None:
    cache = TokenCache(small.llama2(), 10_000)  # its texts are not cut
    cache.ids("small")
    cache.ids("large " * 2000)
    assert list(cache._known) == ["small"]


def test_switched_off() -> None:
    cache = TokenCache(small.byte_level(), 0)
    assert cache.ids("hello world") == plain(small.byte_level(), "hello world")
    assert cache.used_bytes == 0


def test_lists_given_out_are_the_callers_own() -> None:
    cache = TokenCache(small.byte_level(), 1 << 20)
    first = cache.ids("hello world")
    first.clear()
    assert cache.ids("hello world") == plain(small.byte_level(), "hello world")


def test_threads() -> None:
    tokenizer = small.byte_level()
    cache = TokenCache(tokenizer, 30_000)
    texts = [f"text {i % 40} of<|im_end|> many {i % 7}" for i in range(400)]
    expected = [plain(tokenizer, t) for t in texts]
    wrong: list[int] = []

    def work(offset: int) -> None:
        for i in range(len(texts)):
            j = (i + offset) % len(texts)
            if cache.ids(texts[j]) != expected[j]:
                wrong.append(j)

    threads = [threading.Thread(target=work, args=(n * 100,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert cache.used_bytes == sum(token_cache._size(p, ids) for p, ids in cache._known.items())


def test_the_limit_stops_the_work_early() -> None:
    cache = TokenCache(small.byte_level(), 1 << 20)
    batches = 0
    encode = cache._encode

    def counting(texts: list[str]) -> list[token_cache.Ids]:
        nonlocal batches
        batches += 1
        return encode(texts)

    cache._encode = counting  # type: ignore[method-assign]
    text = "the dog and the fox " * 200_000
    with pytest.raises(ContextOverflow, match="room for 1000"):
        cache.ids(text, limit=1000)
    assert batches == 1
    short = cache.ids("the dog", limit=1000)
    assert cache.ids("the dog", limit=len(short)) == short
    with pytest.raises(ContextOverflow):
        cache.ids("the dog", limit=len(short) - 1)


def test_lone_surrogates_are_the_clients_fault() -> None:
    with pytest.raises(InvalidRequest):
        CACHES["byte_level"].ids("\ud83d")


def test_a_random_model_is_not_cached() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5))
    cache = TokenCache(tokenizer, 1 << 20)
    assert "random" in cache.why_off
    assert {len(cache.ids("abababab")) for _ in range(50)} != {4}


def test_unknown_splits_are_not_cut() -> None:
    from tokenizers import Regex

    tokenizer = Tokenizer.from_str(small.byte_level().to_str())
    own = pre_tokenizers.Split(Regex(r"\w+ \w+|."), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [own, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    text = "the dog " * 3000
    assert Splitter(tokenizer).split(text) == [text]
    assert len(Splitter(small.byte_level()).split(text) or ()) > 3
