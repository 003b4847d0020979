"""The process that sends spans: what it reads, what it keeps, and what an exporter may do to it."""

from __future__ import annotations

import os
import threading

from hypothesis import given
from hypothesis import strategies as st

from evap.span_process import BATCH, Sender, frames, resource
from evap.tracing import DROPPED, EXPORTED, LENGTH, REFUSED, decode
from tests.test_tracing import ENDED


class _Exporter:
    """Gives its results in order; a threading.Event is waited for first."""

    def __init__(self, *results: str | Exception | threading.Event) -> None:
        self.results = list(results)
        self.sizes: list[int] = []

    def export(self, spans: list[object]) -> object:
        self.sizes.append(len(spans))
        result = self.results.pop(0)
        if isinstance(result, threading.Event):
            result.wait()
            result = "SUCCESS"
        if isinstance(result, Exception):
            raise result
        return type("Result", (), {"name": result})


def test_whatever_an_exporter_does_the_next_spans_are_sent() -> None:
    page = [0, 0, 0]
    exporter = _Exporter(ValueError("odd"), "FAILURE", "SUCCESS")
    sender = Sender(resource(), exporter, page)
    for _ in range(2 * BATCH + 1):
        sender.put(ENDED)
    sender.close(60.0)
    assert exporter.sizes == [BATCH, BATCH, 1]
    assert (page[EXPORTED], page[REFUSED], page[DROPPED]) == (1, 2 * BATCH, 0)


def test_what_waits_is_bounded() -> None:
    page, gate = [0, 0, 0], threading.Event()
    sender = Sender(resource(), _Exporter(gate, "SUCCESS", "SUCCESS"), page, capacity=BATCH)
    for _ in range(4 * BATCH):
        sender.put(ENDED)
    assert 2 * BATCH <= page[DROPPED] <= 3 * BATCH, "one batch is on its way at most, and one waits"
    gate.set()
    sender.close(60.0)
    assert page[EXPORTED] == 4 * BATCH - page[DROPPED]


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_frames_come_out_as_they_went_in(parts: list[bytes]) -> None:
    read, write = os.pipe()
    os.write(write, b"".join(LENGTH.pack(len(part)) + part for part in parts) + b"\x05\0")  # and half of one
    os.close(write)
    assert list(frames(read)) == parts
    os.close(read)


def test_what_has_ended_crosses_whole() -> None:
    from evap.tracing import _encode

    assert decode(_encode(ENDED)) == ENDED
