from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.config import EngineConfig
from evap.engine.torch import wire
from evap.messages import EngineInfo, GenerateRequest, SamplingParams, TokenLogprobs, TopLogprob

REQUEST = GenerateRequest(
    prompt_ids=[0, 5, 2**31 - 1],
    sampling=SamplingParams(max_tokens=3, seed=2**63, logit_bias={7: -1.5}, stop_token_ids=(1, 2), logprobs=0),
    priority=-2,
    cache_salt="s\u00e4lt",
)
TO_WORKER: list[wire.ToWorker] = [
    wire.Boot(EngineConfig(threads=3), "/a/model", 4096),
    wire.pack_request(1, 2, REQUEST),
    wire.Cancel(1, 2),
    wire.Stop(),
]
INFO = EngineInfo(engine="torch", device="cpu", dtype="float32", max_model_len=9, vocab_size=8, max_running=7)
FROM_WORKER: list[wire.FromWorker] = [
    wire.Progress("half-way"),
    wire.Ready(INFO),
    wire.LogprobBatch([wire.LogprobEntry(1, 2, 3, TokenLogprobs(-0.5, (TopLogprob(9, -0.1),)))]),
    wire.Fatal("broken", "mend it"),
]


def test_a_request_survives_the_journey() -> None:
    (message,) = wire.to_worker().feed(wire.frame(wire.pack_request(1, 2, REQUEST)))
    assert isinstance(message, wire.Submit)
    assert wire.unpack_request(message) == REQUEST


@given(st.lists(st.integers(1, 200), max_size=50))
def test_frames_come_out_whole_however_they_are_cut(cuts: list[int]) -> None:
    data = b"".join(map(wire.frame, TO_WORKER))
    frames = wire.to_worker()
    got: list[wire.ToWorker] = []
    for cut in [*cuts, len(data)]:
        got += frames.feed(data[:cut])
        data = data[cut:]
    assert got == TO_WORKER


def test_the_other_direction() -> None:
    assert list(wire.from_worker().feed(b"".join(map(wire.frame, FROM_WORKER)))) == FROM_WORKER


def test_a_mad_length_is_refused_before_it_is_believed() -> None:
    with pytest.raises(ValueError, match="frame of"):
        list(wire.to_worker().feed(b"\xff\xff\xff\xff"))
