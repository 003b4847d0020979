"""The forward pass against transformers, for every family and every scaling of positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evap.config import EngineConfig
from evap.engine.torch import model as module
from evap.engine.torch.load import BLOCK_SIZE, Loaded, load
from evap.engine.torch.model import pick_device, pick_dtype
from evap.engine.torch.plan import Lane, Planner
from tests.engine.torch.test_rope import KINDS
from tests.engine.torch.tiny import TOLERANCE, Maker, load_tiny, prompts

CPU = torch.device("cpu")


@torch.inference_mode()
def logits(loaded: Loaded, prompt: list[int], chunks: list[int], variant: int = 0) -> torch.Tensor:
    """All logits of a prompt that is computed in chunks."""
    planner = Planner(BLOCK_SIZE, CPU, torch.float32)
    blocks = list(range(loaded.blocks))
    out, start = [], 0
    for count in chunks:
        plan = planner.plan([Lane(blocks, start, count)])
        ids = torch.tensor(prompt[start : start + count])
        out.append(loaded.model.forward(ids, plan, [variant] * count if variant else (), None))
        start += count
    return torch.cat(out)


def compare(model: Any, path: Path, prompt: list[int], variant: int = 0) -> None:
    with torch.no_grad():
        theirs = model(torch.tensor([prompt])).logits[0]
    loaded = load_tiny(path)
    for chunks in ([len(prompt)], [10, len(prompt) - 11, 1]):
        assert (logits(loaded, prompt, chunks, variant) - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_every_family(make: Maker, family: str, tied: bool) -> None:
    settings: dict[str, Any] = {"sliding_window": None} if family == "Mistral" else {}
    model, path = make(family, tie_word_embeddings=tied, **settings)
    compare(model, path, prompts(5)[4])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_logits_with_scaled_positions(make: Maker, kind: dict[str, Any]) -> None:
    model, path = make(rope_parameters={**kind, "rope_theta": 10_000.0})
    # Dynamic scaling depends on the length, beyond the trained 256.
    prompt = prompts(1, lengths=(400,))[0]
    compare(model, path, prompt, 400 if kind["rope_type"] == "dynamic" else 0)


def test_only_the_rows_asked_for_are_projected(make: Maker) -> None:
    loaded = load_tiny(make()[1])
    plan = Planner(BLOCK_SIZE, CPU, torch.float32).plan([Lane([0, 1], 0, 20)])
    ids = torch.arange(3, 23)
    with torch.inference_mode():
        whole = loaded.model.forward(ids, plan, (), None)
        some = loaded.model.forward(ids, plan, (), torch.tensor([3, 19]))
        none = loaded.model.forward(ids, plan, (), torch.tensor([], dtype=torch.int64))
    assert torch.allclose(some, whole[[3, 19]], atol=1e-5)
    assert none.shape == (0, 128)


def test_rounded_equals_are_decided_in_float32(make: Maker) -> None:
    _, path = make(tie_word_embeddings=True)
    loaded = load(EngineConfig(dtype="bfloat16", threads=1, kv_cache_mb=1), path, lambda line: None)
    model = loaded.model
    hidden = torch.randn(2, 32).to(torch.bfloat16)
    decide = model.decider(hidden)
    assert decide is not None
    exact = hidden.float() @ model._weights.embedding.float().T
    for row in (0, 1):
        assert decide(row, list(range(20, 128))) == 20 + int(exact[row, 20:].argmax())


def test_nobody_decides_what_is_not_rounded_or_cannot_be_looked_up(make: Maker) -> None:
    hidden = torch.zeros(1, 32)
    assert load_tiny(make(tie_word_embeddings=True)[1]).model.decider(hidden) is None
    assert load_tiny(make(tie_word_embeddings=False)[1]).model.decider(hidden) is None


def test_bfloat16_is_chosen_only_where_it_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    for native, wanted in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(module, "native_bfloat16", lambda native=native: native)
        assert pick_dtype("auto", CPU, "bfloat16") is wanted
    assert pick_dtype("float16", CPU, "bfloat16") is torch.float16
    assert pick_dtype("auto", torch.device("cuda"), "float16") is torch.float16
    assert pick_dtype("auto", torch.device("cuda"), "float32") is torch.bfloat16
    assert pick_device("cpu") == CPU
