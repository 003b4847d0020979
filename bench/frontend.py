"""CPU of the server per streamed token: evap beside the servers that do this job today, in one run.

    python -m bench.frontend --quick --json -        three shapes, three servers, under 90 s
    python -m bench.frontend --json out.json         everything

Every evap row does the whole job: validation, chat template, tokenization, flow control, cancellation, accounting.
Rows named *-asgi, h2-send-data and nghttpd do none of it; fastapi-uvicorn validates. In flood shapes an engine takes
its next step as soon as the loop has gone round once; in paced ones every 10 ms. h2load advertises windows of 1 GiB,
except in `small-window`. Quote ratios: absolute times are this machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import ssl
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from bench.measure import ROOT, Process, Spread, emit, free_port, h2load, machine, say, versions

TOKENS, MANY = 128, 1024
JSON_HEADER = ("-H", "content-type: application/json")


@dataclass(frozen=True)
class Shape:
    """How h2load drives a server. `h1`: the arguments for servers that speak HTTP/1.1 only."""

    name: str
    h2: tuple[str, ...]
    h1: tuple[str, ...]
    tokens: int = TOKENS
    step_ms: float = 0.0
    tls: bool = False
    slope: bool = False
    evap: tuple[str, ...] = ()  # options of evap for this shape alone
    requests: int = 3000  # for a server of about 1 us a token; slower ones get fewer


SHAPES = {
    s.name: s
    for s in (
        Shape("flood-10x50", ("-c", "10", "-m", "50"), ("--h1", "-c", "500", "-m", "1"), slope=True),
        Shape("paced-4x25", ("-c", "4", "-m", "25"), ("--h1", "-c", "100", "-m", "1"), step_ms=10.0, requests=200),
        Shape("256x1", ("-c", "256", "-m", "1"), ("--h1", "-c", "256", "-m", "1"), requests=768),
        Shape(
            "256x1-coalesced",
            ("-c", "256", "-m", "1"),
            ("--h1", "-c", "256", "-m", "1"),
            requests=768,
            evap=("--coalesce-ms", "10"),
        ),
        Shape("one-token", ("-c", "10", "-m", "50"), ("--h1", "-c", "500", "-m", "1"), tokens=1, requests=8000),
        Shape(
            "small-window",
            ("-c", "10", "-m", "50", "-w", "16", "-W", "16"),
            ("--h1", "-c", "500", "-m", "1"),
            requests=2000,
        ),
        Shape("tls-10x50", ("-c", "10", "-m", "50"), ("--h1", "-c", "500", "-m", "1"), tls=True, requests=2000),
        Shape("h1-500x1", ("--h1", "-c", "500", "-m", "1"), ("--h1", "-c", "500", "-m", "1"), requests=1000),
    )
}


@dataclass(frozen=True)
class Peer:
    """A server. `work`: how many times slower than evap it is expected to be, to keep every run near a second."""

    name: str
    command: tuple[str, ...]
    h2: bool
    work: float
    tls: tuple[str, ...] | None = None
    shapes: tuple[str, ...] = tuple(SHAPES)
    does: str = "no validation, template, tokenization or accounting"


PY = sys.executable
UVICORN = ("-m", "uvicorn", "--port", "{port}", "--log-level", "warning", "--loop", "uvloop")
GRANIAN = str(Path(PY).parent / "granian")
PEERS = {
    p.name: p
    for p in (
        Peer(
            "evap",
            (
                PY, "-m", "evap", "serve", "--engine", "synthetic", "--port", "{port}", "--synthetic-step-ms", "{step}",
                "--max-running", "1024", "--max-queued", "4096", "--log-level", "warning",
            ),
            h2=True, work=1, tls=("--tls-cert", "{cert}", "--tls-key", "{key}"),
            does="validation, chat template, tokenization, flow control, cancellation, accounting",
        ),
        Peer(
            "fastapi-uvicorn",
            (PY, *UVICORN, "bench.peers.fastapi_app:app"),
            h2=False, work=40, tls=("--ssl-certfile", "{cert}", "--ssl-keyfile", "{key}"), does="pydantic validation",
        ),
        Peer(
            "uvicorn-asgi",
            (PY, *UVICORN, "bench.peers.asgi_app:app"),
            h2=False, work=16, tls=("--ssl-certfile", "{cert}", "--ssl-keyfile", "{key}"),
        ),
        Peer(
            "hypercorn-asgi",
            (
                PY, "-m", "hypercorn", "bench.peers.asgi_app:app", "-b", "127.0.0.1:{port}", "-k", "uvloop",
                "--log-level", "error",
            ),
            h2=True, work=40, shapes=("flood-10x50", "paced-4x25", "256x1", "one-token"),
        ),
        Peer(
            "granian-asgi",
            (
                GRANIAN, "--interface", "asgi", "--http", "auto", "--port", "{port}", "--log-level", "error",
                "--backpressure", "2048", "bench.peers.asgi_app:app",
            ),
            h2=True, work=8,
            shapes=("flood-10x50", "paced-4x25", "256x1", "256x1-coalesced", "one-token", "small-window"),
        ),
        Peer(
            "h2-send-data", (PY, "-m", "bench.peers.h2_send_data", "{port}"), h2=True, work=10,
            shapes=("flood-10x50", "paced-4x25", "256x1", "one-token"),
        ),
        Peer(
            "nghttpd", ("nghttpd", "--no-tls", "-d", "{htdocs}", "{port}"), h2=True, work=0.5,
            shapes=("flood-10x50", "256x1", "one-token"), does="sends a file of the same size: the floor in C",
        ),
    )
}  # fmt: skip
QUICK_SHAPES = ("flood-10x50", "256x1", "one-token")
QUICK_PEERS = ("evap", "fastapi-uvicorn", "granian-asgi")


class Bench:
    """Servers of one run, started when first used, and the files they need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._servers: dict[tuple[str, float, bool, tuple[str, ...]], tuple[Process, int]] = {}
        self.commands: dict[str, str] = {}
        for tokens in (1, TOKENS, MANY):
            (folder / f"body{tokens}.json").write_text(json.dumps(body(tokens), separators=(",", ":")))
            (folder / "v1").mkdir(exist_ok=True)
            (folder / "v1" / f"{tokens}").write_bytes(b"x" * (191 * tokens))

    def certificate(self) -> tuple[Path, Path]:
        from bench.certificate import write  # noqa: PLC0415 - only the TLS shape needs it

        return write(self.folder)

    def server(self, peer: Peer, shape: Shape) -> tuple[Process, int]:
        extra = shape.evap if peer.name == "evap" else ()
        key = (peer.name, shape.step_ms, shape.tls, extra)
        if key not in self._servers:
            port = free_port()
            command = [*peer.command, *extra]
            values = {"port": port, "step": shape.step_ms, "htdocs": self.folder}
            if shape.tls:
                command += peer.tls or ()
                values["cert"], values["key"] = self.certificate()
            command = [part.format(**values) for part in command]
            process = Process(command, env={"STEP_MS": str(shape.step_ms)})
            self._servers[key] = process, port
            self.commands.setdefault(peer.name, " ".join(peer.command))
            process.wait_port(port)
            check(peer, port, shape.tls)
        return self._servers[key]

    def stop(self) -> None:
        for process, _ in self._servers.values():
            process.stop()

    def once(self, peer: Peer, shape: Shape, tokens: int, requests: int) -> tuple[float, float]:
        """(us of server CPU per request, seconds) of one h2load run."""
        process, port = self.server(peer, shape)
        scheme = "https" if shape.tls else "http"
        arguments = shape.h2 if peer.h2 else shape.h1
        path = "/v1/chat/completions"
        post: tuple[str, ...] = ("-d", str(self.folder / f"body{tokens}.json"), *JSON_HEADER)
        if peer.name == "nghttpd":
            path, post = f"/v1/{tokens}", ()
        load = h2load(process.pid, f"{scheme}://127.0.0.1:{port}{path}", [*arguments, *post], requests=requests)
        return load.cpu_ns / 1e3 / requests, load.seconds


def body(tokens: int) -> dict[str, Any]:
    return {
        "model": "synthetic", "messages": [{"role": "user", "content": "What does a server cost per token?"}],
        "max_tokens": tokens, "temperature": 0.0, "stream": True, "ignore_eos": True,
    }  # fmt: skip


def check(peer: Peer, port: int, tls: bool) -> None:
    """One request by another client: 128 tokens must come back, or the figures mean nothing."""
    if peer.name in {"nghttpd", "h2-send-data"}:  # neither speaks HTTP/1.1
        return
    context = ssl._create_unverified_context() if tls else None
    url = f"{'https' if tls else 'http'}://127.0.0.1:{port}/v1/chat/completions"
    request = Request(url, json.dumps(body(TOKENS)).encode(), {"content-type": "application/json"})
    with urlopen(request, context=context, timeout=60) as answer:
        text = answer.read()
    events = text.count(b'"content":"') - text.count(b'"content":""')
    if events != TOKENS or not text.rstrip().endswith(b"data: [DONE]"):
        raise RuntimeError(f"{peer.name} sent {events} tokens instead of {TOKENS}")


def amount(peer: Peer, shape: Shape, tokens: int, quick: bool) -> int:
    """Requests of a run, so that it takes about a second; at least one for every stream that h2load opens."""
    streams = 1
    for flag in ("-c", "-m"):
        streams *= int(shape.h2[shape.h2.index(flag) + 1])
    scale = shape.requests * (shape.tokens / tokens) / max(peer.work, 1.0) / (2 if quick else 1)
    if shape.step_ms:
        return 2 * streams
    return max(streams, int(scale // streams) * streams)


def measure(bench: Bench, shape: Shape, peers: Sequence[Peer], repeat: int, quick: bool) -> list[dict[str, Any]]:
    """Rows of one shape; the repetitions of all peers are interleaved."""
    lengths = [shape.tokens, MANY] if shape.slope else [shape.tokens]
    runs: dict[tuple[str, int], list[tuple[float, float]]] = {}
    counts = {(p.name, t): amount(p, shape, t, quick) for p in peers for t in lengths}
    for peer in peers:
        for tokens in lengths[:1]:
            bench.once(peer, shape, tokens, min(counts[peer.name, tokens], 512))  # warm-up
    for _ in range(repeat):
        for peer in peers:
            for tokens in lengths:
                runs.setdefault((peer.name, tokens), []).append(
                    bench.once(peer, shape, tokens, counts[peer.name, tokens])
                )
    return [row(peer, shape, runs, counts) for peer in peers]


def row(peer: Peer, shape: Shape, runs: dict[Any, list[tuple[float, float]]], counts: dict[Any, int]) -> dict[str, Any]:
    per_request = [us for us, _ in runs[peer.name, shape.tokens]]
    count = counts[peer.name, shape.tokens]
    out: dict[str, Any] = {
        "name": peer.name,
        "shape": shape.name,
        "does": peer.does,
        "tokens": shape.tokens,
        "requests": count,
    }
    Spread.of(per_request).into(out, "us_per_request", 1)
    Spread.of([us / shape.tokens for us in per_request]).into(out, "us_per_token")
    Spread.of([count * shape.tokens / s for _, s in runs[peer.name, shape.tokens]]).into(out, "tok_per_s", 0)
    if shape.slope:
        many = [us for us, _ in runs[peer.name, MANY]]
        slopes = [(b - a) / (MANY - shape.tokens) for a, b in zip(per_request, many, strict=True)]
        Spread.of(slopes).into(out, "marginal_us_per_token")
    say(f"{shape.name:17}{peer.name:18}{out['us_per_token']:9.3f} us/token {out['us_per_request']:10.1f} us/request")
    return out


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """peer / evap for the medians of each shape."""
    found = {}
    for ours in (r for r in rows if r["name"] == "evap"):
        for other in (r for r in rows if r["shape"] == ours["shape"] and r["name"] != "evap"):
            for key in ("us_per_request", "marginal_us_per_token"):
                if ours.get(key):
                    found[f"{ours['shape']}/{other['name']}/{key}"] = round(other[key] / ours[key], 2)
    return found


@contextlib.contextmanager
def running() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            yield bench
        finally:
            bench.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the flood, 256x1 and 1-token rows against two peers")
    parser.add_argument("--json", metavar="FILE", default="-", help="where the document goes; - is stdout")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions, interleaved")
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), help="only these")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), help="only these")
    given = parser.parse_args()
    if shutil.which("h2load") is None:
        parser.error("h2load is not installed: apt install nghttp2-client")
    shapes = [SHAPES[n] for n in given.shapes or (QUICK_SHAPES if given.quick else SHAPES)]
    names = given.peers or (QUICK_PEERS if given.quick else list(PEERS))
    peers = [PEERS[n] for n in names if n != "nghttpd" or shutil.which("nghttpd")]
    rows: list[dict[str, Any]] = []
    with running() as bench:
        for shape in shapes:
            able = [p for p in peers if shape.name in p.shapes and (not shape.tls or p.tls)]
            rows += measure(bench, shape, able, given.repeat, given.quick)
        document = {
            "bench": "frontend", "machine": machine(),
            "versions": versions("evap", "h2", "uvloop", "numpy", "uvicorn", "fastapi", "hypercorn", "granian"),
            "commands": bench.commands, "note": (__doc__ or "").split("\n\n")[-1].replace("\n", " "),
            "rows": rows, "ratios": ratios(rows),
        }  # fmt: skip
    emit(document, given.json)
    return 0


if __name__ == "__main__":
    assert ROOT.is_dir()
    sys.exit(main())
