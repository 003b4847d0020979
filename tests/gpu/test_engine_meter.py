"""The embedded engine on a GPU: the kernels count what it gives, and the page has a step before its tokens go out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench import tiny_llama
from evap.config import EngineConfig
from evap.engine.meter import StepMeter
from evap.messages import META, NO_TOKEN, GenerateRequest, SamplingParams
from evap.metering.counters import Counters

SLOTS = 16


@pytest.mark.parametrize("device", ["cuda"])
def test_the_page_has_what_the_engine_gave(device: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch")
    from evap.engine.torch.engine import Engine
    from evap.engine.torch.load import load

    config = EngineConfig(device=device, kv_cache_mb=64)
    loaded = load(config, tiny_llama.build(tmp_path / "model"), lambda line: None)
    engine = Engine(loaded, max_running=8, prefill_chunk=32)
    pages = Counters(SLOTS, 1, None, ahead=False, now_ns=time.monotonic_ns(), unix_ns=time.time_ns())
    engine.meter = StepMeter(pages.specs[0], device, time.monotonic_ns)
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    for slot in range(SLOTS):
        engine.submit(slot, 3, GenerateRequest(prompt_ids=list(range(5, 60 + 3 * slot)), sampling=sampling))
    given = [0] * SLOTS
    while not engine.idle:
        records = engine.step()
        for slot, flags in zip(records.slot, records.flags, strict=True):
            given[slot] += not flags & (META | NO_TOKEN)
        for slot in set(records.slot):
            row = pages.row(slot, 3)
            assert (row.computed if row is not None else 0) == given[slot]
    assert given == [40] * SLOTS
    rows = [pages.row(slot, 3) for slot in range(SLOTS)]
    assert all(row is not None and row.first_us <= row.last_us < 600_000_000 for row in rows), "on the host's clock"
    assert pages.progress == engine.steps
    pages.close()
