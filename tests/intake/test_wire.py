"""Every message and every error comes out as it went in."""

from __future__ import annotations

import pytest

from evap import errors
from evap.intake import wire
from evap.messages import ParsedRequest, SamplingParams


@pytest.mark.parametrize(
    "message", [wire.Boot("/m", 64, 8, True), wire.Parse(1, "chat"), wire.Encode(1, 100), wire.Cancel(1)]
)
def test_to_worker(message: wire.ToWorker) -> None:
    assert wire.to_worker.decode(wire.encode(message)) == message


@pytest.mark.parametrize(
    "message", [wire.Ready(), wire.Parsed(1, 9), wire.Encoded(1, 2, 0, 5, 7), wire.Failed(1, "Traceback")]
)
def test_from_worker(message: wire.FromWorker) -> None:
    assert wire.from_worker.decode(wire.encode(message)) == message


@pytest.mark.parametrize("kind", [errors.InvalidRequest, errors.ContextOverflow, errors.Overloaded])
def test_errors_are_the_same_errors(kind: type[errors.EvapError]) -> None:
    error = kind("it is \u20ac", param="messages[0].content", code=None)
    made = wire.error(wire.refused(1, error))
    assert (type(made), made.message, made.param, made.code) == (kind, error.message, error.param, error.code)


def test_a_refusal_fits_into_a_packet() -> None:
    worst = errors.InvalidRequest("\U0001f600" * 5000, param="messages[1].content", code="c")
    assert len(wire.encode(wire.refused(1, worst))) < wire.MAX_PACKET
    assert len(wire.encode(wire.Failed(1, "\U0001f600" * wire.MAX_TRACE_CHARS))) < wire.MAX_PACKET


def test_a_bare_request_is_all_but_its_prompt() -> None:
    sampling = SamplingParams(temperature=0.5, logit_bias={7: -1.5}, stop_token_ids=(1, 2), extra={"a": [None, {}]})
    full = ParsedRequest(
        model="m", messages=[{"role": "user", "content": "x" * 1000}], template_args={"tools": [1]}, sampling=sampling,
        max_tokens=5, n=3, stop=("a", "b"), stream=True, echo=True, user="me",
    )  # fmt: skip
    bare = wire.request.decode(wire.bare(full))
    assert bare == ParsedRequest(
        model="m", sampling=sampling, max_tokens=5, n=3, stop=("a", "b"), stream=True, echo=True, user="me"
    )
    assert len(wire.bare(full)) < 500
