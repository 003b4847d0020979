"""Every limit of the wire is where its option says: what overruns a small value does not overrun a large one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evap.protocol import headers as code
from tests.protocol import frames as f
from tests.protocol.http1_wire import GET, Wire
from tests.protocol.joined import Raw
from tests.protocol.test_spending import SMALL, floods, resets


def block(fragments: int, size: int = 1) -> bytes:
    """HEADERS and so many CONTINUATION frames, of which none is the last."""
    return f.headers(1, flags=0) + f.frame(f.CONTINUATION, 0, 1, b"\x82" * size) * fragments


def table_of(size: int) -> bytes:
    """A request whose block sets the HPACK table to so many octets (RFC 7541 6.3)."""
    update = bytes([0x3F]) + bytes([size - 31 & 0x7F | 0x80, size - 31 >> 7]) if size > 158 else bytes([0x20])
    return f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, 1, update + f.block(f.GET))


def early(size: int) -> Callable[[Raw], object]:
    """A body that is answered by 413, and goes on."""

    def run(raw: Raw) -> None:
        raw.send(f.headers(1, [*f.POST, (b"content-length", b"100000000")]))
        for _ in range(size // 10_000):
            raw.send(f.data(1, bytes(10_000)))

    return run


def drips(size: int) -> Callable[[Raw], object]:
    """A reader that takes so many octets a second."""

    def run(raw: Raw) -> None:
        raw.send(f.settings((4, 0)), f.get(1))
        raw.requests()[0].reply.whole(200, [], bytes(100_000))
        for _ in range(40):
            raw.wait(1)
            raw.send(f.window(1, size))

    return run


def whole_answer(raw: Raw) -> None:
    """More WINDOW_UPDATE frames than the burst, each after a DATA frame of ours."""
    raw.send(f.get(1))
    raw.requests()[0].reply.whole(200, [], bytes(1_000_000))
    for _ in range(80):
        raw.send(f.window(0, 10_000), f.window(1, 10_000))
        raw.flush()


#: option -> (a value that is overrun, one that is not, what overruns it, the limit that says so)
FLAGS: dict[str, tuple[float, float, Callable[[Raw], object], str]] = {
    "max_continuations": (8, 30, lambda raw: raw.send(block(20)), "header_block"),
    "max_header_block_bytes": (5000, 20_000, lambda raw: raw.send(block(2, 4000)), "header_block"),
    "header_list_factor": (
        1, 4, lambda raw: raw.send(f.headers(1, [*f.GET, (b"x", b"y" * 6000)], end=True)), "",
    ),
    "max_headers": (8, 16, lambda raw: raw.send(f.get(1, *[(b"x", b"y")] * 8)), "header_list"),
    "max_settings": (16, 60, lambda raw: raw.send(f.settings(*[(4, 5)] * 50)), "settings"),
    "hpack_table_bytes": (256, 8192, lambda raw: raw.send(table_of(1024)), "hpack_table"),
    "frames_at_once": (5, 500, floods(f.ping(), times=20), "frames_at_once"),
    "tiny_data_bytes": (64, 8, floods(f.data(1, bytes(30)), first=f.headers(1), times=100), "control_frames"),
    "late_burst": (50, 500, floods(f.data(1), first=f.get(1) + f.rst(1), times=100), "late_frames"),
    "discard_bytes": (100_000, 1_000_000, early(300_000), "unwanted_body"),
    "min_progress_bytes": (1024, 16, drips(20), "stall_timeout"),
    "window_update_credit": (0, 4, whole_answer, "window_updates"),
    "reset_burst": (5, 200, resets, "resets"),
    "control_burst": (50, 5000, floods(f.ping(), times=1000), "control_frames"),
}  # fmt: skip


@pytest.mark.parametrize("option", FLAGS)
def test_a_limit_is_where_its_option_says(option: str) -> None:
    low, high, overrun, limit = FLAGS[option]
    counts = []
    for value in (low, high):
        raw = Raw(**{**SMALL, "late_burst": 50, "max_header_list_bytes": 4096, "max_body_bytes": 1000, option: value})
        overrun(raw)
        counts.append((raw.shared.limits[limit] if limit else int(not raw.healthy), raw.core.unread))
    assert counts[0][0] >= 1
    assert counts[1][0] == 0


def test_a_client_may_fill_the_standard_table_until_it_knows_ours() -> None:
    """RFC 7541 4.2: a smaller table holds once the client has acknowledged it, and its next block says so."""
    raw = Raw(greet=False, hpack_table_bytes=256)
    raw.send(f.PREFACE + f.settings(), table_of(1024))
    assert raw.status(1) is None
    assert len(raw.requests()) == 1
    raw.send(f.settings_ack(), f.headers(3, f.GET, end=True))
    assert (raw.goaway, raw.shared.limits["hpack_table"]) == (code.COMPRESSION_ERROR, 1)


def test_a_client_that_shrinks_its_table_is_served() -> None:
    raw = Raw(hpack_table_bytes=0)
    raw.send(table_of(0))
    assert len(raw.requests()) == 1
    assert raw.core.conn.request_decoder.header_table.maxsize == 0


def test_the_turn_of_a_connection_ends_and_goes_on() -> None:
    raw = Raw(frames_at_once=5, control_burst=1000)
    raw.send(f.ping() * 20, f.get(1))
    assert raw.shared.limits["frames_at_once"] >= 4
    assert len(raw.requests()) == 1


def test_what_is_unsent_is_bounded_by_its_option() -> None:
    raw = Raw(write_buffer_bytes=32_768)
    raw.send(f.settings((4, 1 << 20)), f.window(0, 1 << 20), f.get(1))
    raw.holds = 32_768
    raw.core.written(32_768, raw.now_ns)
    reply = raw.requests()[0].reply
    reply.start(200, [])
    reply.send(bytes(500_000))
    raw.flush()
    assert reply.buffered == 500_000
    assert not raw.core.writable


def test_how_long_what_comes_after_an_answer_is_thrown_away() -> None:
    for seconds, expected in ((0.2, [code.NO_ERROR]), (5.0, [])):
        raw = Raw(max_body_bytes=10, linger_s=seconds)
        raw.send(f.headers(1), f.data(1, bytes(11)))
        raw.wait(1)
        assert raw.resets(1) == expected


def test_options_of_http1() -> None:
    line = GET.replace(b"/", b"/" + b"x" * 2000, 1)
    chunks = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20
    for sent, option, low, high, limit in (
        (line, "max_request_line_bytes", 1024, 4096, "header_list"),
        (chunks, "max_tiny_chunks", 10, 100, "tiny_chunks"),
    ):
        for value, count in ((low, 1), (high, 0)):
            wire = Wire(**{option: value})
            wire.receive(sent)
            assert wire.shared.limits[limit] == count, option
