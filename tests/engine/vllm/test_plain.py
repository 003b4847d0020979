"""Plain outputs read by numpy are those that a decoder finds; whatever else a message has is left as it was."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.engine.vllm.ids import make
from evap.engine.vllm.plain import Found, PlainReader

encode = msgspec.msgpack.encode
SAMPLE = make("000000", 0, 0, 0)


def output(request_id: str, tokens: list[int], **fields: Any) -> list[Any]:
    """As vLLM 0.32 sends it: an array of 18."""
    names = ("new_logprobs", "prompt", "pooling", "finish", "stop", "events", "kv", "ec", "trace", "stats")
    return [request_id, tokens, *(fields.get(name) for name in names), None, 0, None, None, None, None]


def frame(*outputs: list[Any]) -> bytes:
    return encode([0, list(outputs), None, 1.5, None, None, None, None, None])


def reader() -> PlainReader:
    return PlainReader(frame(output(SAMPLE, [1])), encode(output(SAMPLE, [1])), SAMPLE)


def name(slot: int, generation: int = 3) -> str:
    return make("abcdef", 77, slot, generation)


def listed(found: Found) -> list[tuple[int, int, int]]:
    columns = (found.slots, found.generations, found.tokens)
    assert all(column.dtype == np.int32 for column in columns)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def others(found: Found) -> Any:
    return msgspec.msgpack.decode(found.others)[1] if found.others is not None else []


def test_a_plain_step_leaves_nothing() -> None:
    found = reader().read(frame(output(name(5), [7]), output(name(65535, 65535), [300])))
    assert found is not None
    assert listed(found) == [(5, 3, 7), (65535, 65535, 300)]
    assert found.others is None


@pytest.mark.parametrize(
    "other",
    [
        output(name(1), []), output(name(1), [6, 7]), output(name(1), [6], finish=0), output(name(1), [6], finish=1),
        output(name(1), [6], stats={"x": 0}), output(name(1), [6], trace={"x": "1"}),
        output(name(1), [6], new_logprobs=["x"]), output(name(1), [6], prompt=["x"]),
        output(name(1), [6], new_logprobs=[7, None]), output(name(1), [300], new_logprobs=[None]),
        output(name(1), [6], prompt=["x", None, None]), output(name(1), [6], kv={"x": None}),
        output(name(1), [6], pooling=["x", None]), output(name(1), [6], stop=0), output("of-somebody-else", [6]),
        output("of-somebody-else-24-long", [6]), [*output(name(1), [6])[:-1], 0], [name(1), [6]],
    ],
)  # fmt: skip
def test_one_that_is_not_plain_stays_in_a_message_of_its_own(other: list[Any]) -> None:
    read = reader().read
    assert read(frame(other)) is None
    one, two = output(name(8), [5]), output(name(9), [50_000])
    for outputs in ([other, one, two], [one, other, two], [one, two, other], [other, one, other, two, other]):
        found = read(frame(*outputs))
        assert found is not None
        assert listed(found) == [(8, 3, 5), (9, 3, 50_000)]
        assert others(found) == [o for o in outputs if o is other]
        assert found.other_count == len(others(found))


@pytest.mark.parametrize(
    "message", [frame(), encode([0, [], None, 1.5, [3, None, [None, True]]]), b"ENGINE_CORE_DEAD", b"", b"\x99\x00\xdc"]
)
def test_other_messages_have_nothing_plain(message: bytes) -> None:
    assert reader().read(message) is None


def test_the_same_requests_are_the_same_arrays() -> None:
    read = reader().read
    first, second = (read(frame(output(name(5), [t]), output(name(6), [t]))) for t in (7, 70_000))
    third = read(frame(output(name(5), [7])))
    assert first is not None
    assert second is not None
    assert third is not None
    assert second.slots is first.slots
    assert second.generations is first.generations
    assert not first.slots.flags.writeable
    assert third.slots is not first.slots


#: tokens whose bytes look like what stands around them
TOKENS = st.integers(0, 2**31 - 1) | st.sampled_from(
    [0, 127, 128, 255, 256, 0xC0, 0xC000, 0x91C0, 0x40C0C0C0, 0xC0C000]
)
OUTPUTS = st.lists(
    st.tuples(
        TOKENS,
        st.sampled_from(
            [
                {}, {}, {}, {}, {"finish": 1}, {"stats": {"num_cached_tokens": 0}}, {"new_logprobs": [None, 0]},
                {"trace": {"evap": "3:4"}}, {"stop": "\x00\x00", "finish": 0}, {"kv": {"a": [None] * 12 + [0]}},
            ]
        ),
    ),
    max_size=40,
)  # fmt: skip


@given(st.lists(OUTPUTS, min_size=1, max_size=4))
def test_any_mixture_is_read_as_a_decoder_reads_it(steps: list[list[tuple[int, dict[str, Any]]]]) -> None:
    read = reader().read
    for step in steps:
        outputs = [output(name(n, n % 5), [token], **fields) for n, (token, fields) in enumerate(step)]
        plain = [(n, n % 5, token) for n, (token, fields) in enumerate(step) if not fields]
        found = read(frame(*outputs))
        if found is None:
            assert not plain
            continue
        assert listed(found) == plain
        assert others(found) == [o for o, (_, fields) in zip(outputs, step, strict=True) if fields]


def test_an_encoding_in_which_plain_outputs_cannot_be_known_is_refused() -> None:
    for tail in ([None] * 16, [None] * 3 + [0], [0] + [None] * 15, []):
        one = [SAMPLE, [1], *tail]
        with pytest.raises(ValueError, match="messages"):
            PlainReader(frame(one), encode(one), SAMPLE)
