"""The corpus, mutations of it, and bytes that resemble HTTP/1.1, against the invariant of fuzz/http1.py."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.protocol import http1_reader
from evap.protocol.http1_parse import Head, read_head
from fuzz import http1, runner

CORPUS = sorted((Path(__file__).parents[2] / "fuzz" / "corpus" / "http1").iterdir())
SEEDS = [path.read_bytes() for path in CORPUS]


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.name)
def test_corpus(path: Path) -> None:
    http1.one_input(path.read_bytes())


@given(st.integers(0, 1 << 62))
def test_mutations(seed: int) -> None:
    http1.one_input(runner.mutated(SEEDS, random.Random(seed)))


LINES = [
    b"GET / HTTP/1.1", b"POST /x?y HTTP/1.1", b"GET / HTTP/1.0", b"Host: x", b"Host: y:1", b"Content-Length: 3",
    b"Content-Length: 0", b"Transfer-Encoding: chunked", b"Connection: close", b"Connection: keep-alive", b"A: b", b"",
    b"abc", b"3", b"0", b"3;x", b"Expect: 100-continue", b"Upgrade: h2c", b" fold", b"Te: trailers",
]  # fmt: skip
ENDS = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b" \r\n", b"", b"\0\r\n"])


@given(st.integers(0, 63), st.lists(st.tuples(st.sampled_from(LINES), ENDS), max_size=14))
def test_lines_in_any_order(portions: int, lines: list[tuple[bytes, bytes]]) -> None:
    http1.one_input(bytes([portions]) + b"".join(line + end for line, end in lines))


@pytest.mark.parametrize(
    "smuggled",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_the_invariant_can_fail(smuggled: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that believes content-length where both framings are given, and one that takes HTTP/1.1 for 1.0."""
    http1.one_input(b"\0" + smuggled)

    def read(raw: bytes, *limits: int) -> Head:
        fixed = raw.replace(b"Transfer-Encoding: chunked\r\n", b"") if b"Content-Length" in raw else raw
        return read_head(fixed.replace(b"GET / ", b"GET /wrong "), *limits)

    monkeypatch.setattr(http1_reader, "read_head", read)
    with pytest.raises(AssertionError):
        http1.one_input(b"\0" + smuggled)


def test_a_violation_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "seed").write_bytes(b"abc")
    monkeypatch.setattr(runner, "CORPUS", tmp_path)

    def never(data: bytes) -> Any:
        raise AssertionError("always")

    with pytest.raises(AssertionError, match="always"):
        runner.mutate(never, "toy", 5.0, random.Random(1))
    assert [p.name[:6] for p in (tmp_path / "toy").iterdir() if p.name != "seed"] == ["crash-"]
