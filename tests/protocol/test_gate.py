"""The frame gate: however the bytes are cut, the same frames; nothing is buffered that can be refused by its header."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.config import ProtocolConfig
from evap.protocol import headers as code
from evap.protocol.gate import Frame, Gate, SettingsFilter, Violation, strip_padding
from tests.protocol import frames as f


def gate() -> Gate:
    its = Gate(ProtocolConfig(max_header_list_bytes=1024))
    its.feed(f.PREFACE + f.settings())
    assert len(list(its.frames())) == 1
    return its


def outcome(chunks: list[bytes]) -> tuple[list[Frame], int | None]:
    its, got = gate(), list[Frame]()
    try:
        for chunk in chunks:
            its.feed(chunk)
            got.extend(its.frames())
    except Violation as violation:
        return got, violation.code
    return got, None


FRAMES = st.lists(
    st.one_of(
        st.builds(f.frame, st.integers(0, 18), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=40)),
        st.builds(f.data, st.just(1), st.binary(max_size=300)),
        st.builds(
            lambda sid: f.headers(sid, flags=0) + f.frame(f.CONTINUATION, 4, sid, b"\x82"), st.sampled_from([1, 3])
        ),
    ),
    max_size=8,
)


@given(FRAMES, st.lists(st.integers(0, 2000), max_size=12))
def test_cuts_do_not_matter(frames: list[bytes], cuts: list[int]) -> None:
    wire = b"".join(frames)
    edges = [0, *sorted(cut for cut in cuts if cut < len(wire)), len(wire)]
    chunks = [wire[a:b] for a, b in itertools.pairwise(edges)]
    assert outcome(chunks) == outcome([wire])


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=20))
def test_frames_come_out_as_they_went_in(payloads: list[bytes]) -> None:
    wire = [f.data(1, payload) for payload in payloads]
    got, error = outcome([b"".join(wire)])
    assert [frame.raw for frame in got] == wire
    assert error is None


def test_a_header_block_comes_joined_with_padding_and_priority_taken_off() -> None:
    first = f.frame(f.HEADERS, f.PADDED | f.PRIO | f.END_STREAM, 1, b"\x02" + bytes(5) + b"ab" + bytes(2))
    got, error = outcome([first, f.frame(f.CONTINUATION, 0, 1, b"cd"), f.frame(f.CONTINUATION, f.END_HEADERS, 1, b"")])
    assert error is None
    assert [(frame.block, frame.flags & f.END_HEADERS, frame.flags & f.END_STREAM) for frame in got] == [
        (b"abcd", 4, 1)
    ]


def test_headers_too_short_for_its_flags() -> None:
    assert outcome([f.frame(f.HEADERS, f.PRIO | f.END_HEADERS, 1, bytes(4))])[1] == code.FRAME_SIZE_ERROR
    assert outcome([f.frame(f.HEADERS, f.PADDED | f.END_HEADERS, 1, b"")])[1] == code.FRAME_SIZE_ERROR


@pytest.mark.parametrize(
    ("so_far", "partial"),
    [
        (b"", False),
        (f.ping(), False),
        (f.ping()[:1], True),
        (f.ping()[:12], True),
        (f.data(1, b"slow body")[:12], False),
        (f.headers(1, flags=0), True),
    ],
)
def test_partial(so_far: bytes, partial: bool) -> None:
    its = gate()
    its.feed(so_far)
    list(its.frames())
    assert its.partial is partial


def test_the_preface_may_come_in_pieces_and_must_be_right() -> None:
    its = Gate(ProtocolConfig(max_header_list_bytes=1024))
    for octet in f.PREFACE:
        its.feed(bytes((octet,)))
    its.feed(f.settings())
    assert len(list(its.frames())) == 1
    with pytest.raises(Violation):
        Gate(ProtocolConfig(max_header_list_bytes=1024)).feed(b"PRI * HTTP/1")


def test_settings_for_h2() -> None:
    its = SettingsFilter(32)
    raw, entries = its(f.settings((4, 7), (0x7777, 1), (1, 1 << 31), (8, 1), (4, 9)))
    assert entries == {4: 9, 1: 4096}
    assert raw == f.settings((4, 9), (1, 4096))
    assert its(f.settings()) == (f.settings(), {})


def test_padding() -> None:
    assert strip_padding(f.frame(0, f.PADDED, 1, b"\x00abc"), f.PADDED) == b"abc"
    assert strip_padding(f.frame(0, f.PADDED, 1, b"\x03abc" + bytes(3)), f.PADDED) == b"abc"
    assert strip_padding(f.data(1, b"abc"), 0) == b"abc"
