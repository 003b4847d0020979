"""LoRA adapters: a client names one as the model, and gets its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evap.errors import NotFound
from tests.engine.vllm.live import NEEDS_VLLM, Live, ask, engine

pytestmark = NEEDS_VLLM

RANK, HIDDEN, QUERY = 8, 64, 64


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter of the query projection, strong enough to change every answer."""
    from safetensors.numpy import save_file

    path = tmp_path_factory.mktemp("adapter")
    rng = np.random.default_rng(1)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{name}.lora_A.weight": (RANK, HIDDEN), f"{name}.lora_B.weight": (QUERY, RANK)}
    save_file(
        {k: rng.normal(0, 3, s).astype(np.float32) for k, s in shapes.items()}, path / "adapter_model.safetensors"
    )
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 64, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "CAUSAL_LM"}))
    return path


@pytest.fixture(scope="module")
def adapted(tiny: Path, adapter: Path) -> Iterator[Live]:
    with engine(tiny, lora=(f"mine={adapter}",)) as live:
        yield live


def test_an_adapter_changes_the_answer_and_the_model_stays_itself(adapted: Live, core: Live) -> None:
    assert adapted.replica.adapters == ("mine",)
    prompt = list(range(2, 40))
    (plain,) = adapted.generate(ask(prompt, n=16))
    (mine,) = adapted.generate(ask(prompt, n=16, adapter="mine"))
    (again,) = adapted.generate(ask(prompt, n=16))
    assert plain.tokens == again.tokens
    assert plain.tokens == core.generate(ask(prompt, n=16))[0].tokens
    assert mine.tokens != plain.tokens
    assert len(mine.tokens) == 16


def test_requests_with_and_without_it_share_a_batch(adapted: Live) -> None:
    prompt = list(range(2, 40))
    (plain,) = adapted.generate(ask(prompt, n=16))
    (mine,) = adapted.generate(ask(prompt, n=16, adapter="mine"))
    mixed = adapted.generate(ask(prompt, n=16), ask(prompt, n=16, adapter="mine"), ask(prompt, n=16))
    assert [r.tokens for r in mixed] == [plain.tokens, mine.tokens, plain.tokens]


def test_an_adapter_that_is_not_there(adapted: Live) -> None:
    with pytest.raises(NotFound, match="not loaded"):
        adapted.do(lambda: adapted.replica.submit(1060, 60_001, ask(adapter="other")))
    assert adapted.replica.running == 0
