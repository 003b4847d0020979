"""W3C Trace Context: what is valid is taken, everything else is as if it had not come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.protocol import trace_context
from evap.protocol.events import RequestHead
from evap.protocol.trace_context import TraceContext, read

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{PARENT}-01"


def asked(*fields: tuple[str, str | bytes]) -> TraceContext | None:
    headers = [(n.encode(), v if isinstance(v, bytes) else v.encode()) for n, v in fields]
    return read(
        RequestHead(
            method="POST", path="/", query="", headers=headers, version="2", scheme="http", authority="x", peer="p",
            index=dict(reversed(headers)),
        )
    )  # fmt: skip


def test_a_parent_is_taken_and_our_span_is_new() -> None:
    first, second = asked(("traceparent", GOOD)), asked(("traceparent", GOOD))
    assert first is not None
    assert second is not None
    assert (first.trace_id, first.parent_id, first.flags, first.state) == (TRACE, PARENT, 1, ())
    assert len(first.span_id) == 16
    assert len({first.span_id, second.span_id, PARENT}) == 3
    assert first.traceparent == f"00-{TRACE}-{first.span_id}-01"


@pytest.mark.parametrize(("flags", "known"), [("00", 0), ("01", 1), ("03", 3), ("ff", 3)])
def test_flags_that_nobody_knows_are_dropped(flags: str, known: int) -> None:
    context = asked(("traceparent", GOOD[:-2] + flags))
    assert context is not None
    assert context.flags == known


@pytest.mark.parametrize("later", ["01-" + GOOD[3:], "01-" + GOOD[3:] + "-what-comes", "cc-" + GOOD[3:] + "-"])
def test_a_later_version_is_read_as_far_as_it_is_known(later: str) -> None:
    context = asked(("traceparent", later))
    assert context is not None
    assert context.trace_id == TRACE


@pytest.mark.parametrize(
    "bad",
    [
        "", "00", GOOD[:-1], GOOD + "0", GOOD + "-", GOOD + "-00", " " + GOOD, GOOD.upper(), "ff" + GOOD[2:],
        "0" + GOOD, GOOD.replace("-", "_"), f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{PARENT}-01", f"00-{TRACE}-{PARENT}-0x", "01-" + GOOD[3:] + "x", GOOD + "\n",
    ],
)  # fmt: skip
def test_what_is_malformed_never_came(bad: str) -> None:
    assert asked(("traceparent", bad), ("tracestate", "a=1")) is None


def test_two_parents_are_none() -> None:
    assert asked(("traceparent", GOOD), ("traceparent", GOOD)) is None


def test_state_without_a_parent_is_nothing() -> None:
    assert asked(("tracestate", "a=1")) is None


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", (("rojo", "00f067aa0ba902b7"), ("congo", "t61rcWkgMzE"))),
        (" a=1 ,\t, b=2,", (("a", "1"), ("b", "2"))),
        ("fw529a3039@dt=FfAx,0a=x y", (("fw529a3039@dt", "FfAx"), ("0a", "x y"))),
        ("a=1,a=2", ()),
        ("a=1,B=2", ()),
        ("a=1,b", ()),
        ("a=1,b=", ()),
        ("a=x=y", ()),
        ("a=\x7f", ()),
        ("a=" + "x" * 256, (("a", "x" * 256),)),
        ("a=" + "x" * 257, ()),
        ("a" * 256 + "=1", (("a" * 256, "1"),)),
        ("a" * 257 + "=1", ()),
        (",".join(f"k{n}=1" for n in range(32)), tuple((f"k{n}", "1") for n in range(32))),
        (",".join(f"k{n}=1" for n in range(33)), ()),
    ],
)
def test_state(state: str, expected: tuple[tuple[str, str], ...]) -> None:
    context = asked(("traceparent", GOOD), ("tracestate", state))
    assert context is not None
    assert context.trace_id == TRACE, "a bad tracestate does not spoil its traceparent"
    assert context.state == expected


def test_several_fields_of_state_are_one_list() -> None:
    context = asked(("tracestate", "a=1"), ("traceparent", GOOD), ("tracestate", "b=2"))
    assert context is not None
    assert context.state == (("a", "1"), ("b", "2"))


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_any_bytes_are_read_or_ignored(parent: bytes, state: bytes) -> None:
    asked(("traceparent", parent), ("tracestate", state))
    context = asked(("traceparent", GOOD), ("tracestate", state))
    assert context is not None


def test_a_new_trace() -> None:
    first, second = trace_context.begin(), trace_context.begin()
    assert first.trace_id != second.trace_id
    assert (len(first.trace_id), len(first.span_id), first.parent_id) == (32, 16, "")
    assert first.flags & trace_context.SAMPLED


def test_a_share_of_new_traces_is_sampled() -> None:
    def count(share: float) -> int:
        return sum(trace_context.begin(share).flags & trace_context.SAMPLED for _ in range(1000))

    assert (count(0.0), count(1.0)) == (0, 1000)
    assert 100 < count(0.25) < 400


def test_a_trace_begins_here_only_if_it_is_wanted() -> None:
    def plain(*fields: tuple[bytes, bytes]) -> RequestHead:
        return RequestHead(
            method="GET", path="/", query="", headers=fields, version="2", scheme="http", authority="x", peer="p",
            index=dict(fields),
        )  # fmt: skip

    assert trace_context.of(plain(), "") is None
    begun, broken = trace_context.of(plain(), "http://x"), trace_context.of(plain((b"traceparent", b"no")), "http://x")
    joined = trace_context.of(plain((b"traceparent", GOOD.encode())), "")
    assert begun is not None
    assert broken is not None
    assert joined is not None
    assert (begun.parent_id, broken.parent_id, joined.parent_id) == ("", "", PARENT)
