"""The default model against transformers, token for token, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from evap.config import EngineConfig
from evap.engine.model import resolve
from evap.engine.torch.engine import Engine
from evap.engine.torch.load import Loaded, load
from evap.engine.torch.plan import Lane, Planner
from evap.messages import Finish, SamplingParams
from tests.engine.torch.tiny import generate, greedy, reference

pytestmark = pytest.mark.model

#: Logits are of order 10; two ways to sum the same float32 products differ by this much.
TOLERANCE = 2e-3
TOKENS = 16
CHAT = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers and say why they are prime.",
    "Translate 'good morning' into German, Spanish and Japanese.",
    "def fibonacci(n):",
    "Why is the sky blue? " * 12,
)


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve("smollm2-135m").path


@pytest.fixture(scope="module")
def asked(directory: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids: list[list[int]] = [
        tokenizer.encode(f"{CHAT}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        for question in QUESTIONS
    ]
    return ids


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Loaded:
    return load(EngineConfig(dtype="float32", kv_cache_mb=256), directory, lambda line: None)


def test_logits(loaded: Loaded, theirs: Any, asked: list[list[int]]) -> None:
    prompt = asked[-1]
    with torch.inference_mode():
        plan = Planner(16, torch.device("cpu"), torch.float32).plan([Lane(range(32), 0, len(prompt))])
        mine = loaded.model.forward(torch.tensor(prompt), plan, (), None)
        assert (mine - theirs(torch.tensor([prompt])).logits[0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("chunk", [512, 32])
@pytest.mark.parametrize("together", [True, False])
def test_greedy_tokens(loaded: Loaded, theirs: Any, asked: Sequence[list[int]], chunk: int, together: bool) -> None:
    it = Engine(loaded, max_running=4, prefill_chunk=chunk)
    asked = asked if together else asked[::2]
    wanted = {slot: reference(theirs, prompt, TOKENS) for slot, prompt in enumerate(asked)}
    for cached in (False, True):
        outcome = generate(it, [(prompt, greedy(TOKENS)) for prompt in asked], together)
        assert outcome.tokens == wanted
        assert all((outcome.cached[slot] > len(prompt) - 17) for slot, prompt in enumerate(asked)) or not cached


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_it_knows_the_capital_of_france(directory: Path, asked: list[list[int]], dtype: str) -> None:
    """In bfloat16 "The" and "L" are equally likely first tokens; in float32 "The" is ahead by a tenth."""
    from tokenizers import Tokenizer

    loaded = load(EngineConfig(dtype=dtype, kv_cache_mb=64), directory, lambda line: None)
    it = Engine(loaded, max_running=4, prefill_chunk=512)
    outcome = generate(it, [(asked[0], SamplingParams(max_tokens=50, temperature=0.0))])
    assert outcome.finish[0] is Finish.STOP
    text = Tokenizer.from_file(str(directory / "tokenizer.json")).decode(outcome.tokens[0])
    assert text == "The capital of France is Paris."
