"""The default model as it comes from the package index: its tokenizer, its template, and that it can answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evap.engine.model import resolve
from evap.engine.tokenizer import HfText, load_text

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve("").path


@pytest.fixture(scope="module")
def text(path: Path) -> HfText:
    return load_text(path)


def test_known_ids(text: HfText) -> None:
    """As published for SmolLM2: <|im_start|> 1, <|im_end|> 2, digits one by one."""
    ids = text.chat_ids(QUESTION, {})
    assert ids[-4:] == [1, 520, 9531, 198]
    assert text.encode("Hello world") == [19556, 905]
    assert len(text.encode("1234567")) == 7
    assert text.eos_ids == {2}
    assert text.vocab_size == 49152
    assert text.fragments is not None
    assert text.fragments.fast.mean() > 0.98


def test_ids_are_those_of_transformers(path: Path, text: HfText) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(str(path))
    chats = [
        QUESTION,
        [{"role": "system", "content": "x"}, *QUESTION, {"role": "assistant", "content": "삼겹살👩‍👩‍👧ď\n\n"}],
    ]
    for chat in chats:
        assert text.chat_ids(chat, {}) == theirs.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )


def test_it_answers(path: Path, text: HfText) -> None:
    """The weights are right: q and k in their order, the embedding tied. float32, greedy."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"]
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    prompt = torch.tensor([text.chat_ids(QUESTION, {})])
    with torch.inference_mode():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20)
    assert text.decode(out[0, prompt.shape[1] :].tolist()) == "The capital of France is Paris."
