"""What the server says once it is ready: the address, and a request that works when it is pasted.

The first line, `evap VERSION ready at URL in N s`, is for programs too (the tests read the port from it). On a terminal
the banner is set in colour by rich; nothing is ever wrapped, so that the curl line stays one line.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass
from typing import Final, TextIO

from evap import __version__
from evap.config import Config
from evap.messages import EngineInfo

QUESTION: Final = "What is the capital of France?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What there is to say. `host` and `port` are what was bound; `tls` is "", "self-signed" or "certificate".

    port 0: no TCP port. unix: paths of UNIX sockets.
    """

    host: str
    port: int
    model: str
    engine: str
    device: str
    dtype: str = ""
    max_model_len: int = 0
    tls: str = ""
    chat: bool = True  # the model has a chat template
    started_s: float = 0.0
    unix: tuple[str, ...] = ()
    workers: int = 1  # loop processes
    keys: bool = False  # requests need one

    @property
    def url(self) -> str:
        return _url(self.host, self.port, bool(self.tls)) if self.port else f"unix:{self.unix[0]}"


def _url(host: str, port: int, tls: bool) -> str:
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{host}:{port}"


def curl(ready: Ready) -> str:
    """A curl command, on one line, that streams an answer. An address that means "all" becomes the loopback one. Where
    a key is needed, the shell's $KEY has it."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104  # compared, not bound
    base = _url(loopback.get(ready.host, ready.host), ready.port, bool(ready.tls))
    words = ["curl", "-sN"]
    if not ready.port:
        base = "http://localhost"
        words += ["--unix-socket", ready.unix[0], "--http2-prior-knowledge"]
    elif not ready.tls:
        words.append("--http2-prior-knowledge")
    elif ready.tls == "self-signed":
        words.append("-k")
    question: dict[str, object] = (
        {"messages": [{"role": "user", "content": QUESTION}]} if ready.chat else {"prompt": "The capital of France is"}
    )
    body = json.dumps({**question, "temperature": 0, "stream": True}, separators=(",", ":"))
    path = "/v1/chat/completions" if ready.chat else "/v1/completions"
    key = ' -H "authorization: Bearer $KEY"' if ready.keys else ""
    rest = shlex.join(["-H", "content-type: application/json", "-d", body])
    return f"{shlex.join([*words, base + path])}{key} {rest}"


def lines(ready: Ready) -> list[tuple[str, str]]:
    """(label, text) of each line; the first has no label."""
    arithmetic = f", {ready.dtype}" if ready.dtype not in ("", "none") else ""
    device = f" on {ready.device}" if ready.device not in ("", "none") else ", without a model"
    context = f", context {ready.max_model_len:,} tokens" if ready.max_model_len else ""
    said = [
        ("", f"evap {__version__} ready at {ready.url} in {ready.started_s:.1f} s"),
        ("model", ready.model + context),
        ("engine", f"{ready.engine}{device}{arithmetic}"),
        ("speaks", "HTTP/2 and HTTP/1.1" + (f" over TLS ({ready.tls})" if ready.tls else ", without TLS")),
        ("try", curl(ready)),
    ]
    if ready.keys:
        said.insert(-1, ("keys", "KEY=... with a secret that `python -m evap keys create` has printed, then"))
    if ready.workers > 1:
        said.insert(3, ("workers", f"{ready.workers} loop processes"))
    if ready.port and ready.unix:
        said.insert(1, ("also at", ", ".join(f"unix:{path}" for path in ready.unix)))
    if ready.port and ready.host in ("0.0.0.0", "::", ""):  # noqa: S104  # compared, not bound
        said.insert(-1, ("note", "reachable from every network of this machine"))
    return said


def plain(ready: Ready) -> str:
    """The banner as text, with a newline at the end."""
    return "".join(f"  {label:8}{text}\n" if label else f"{text}\n" for label, text in lines(ready))


def as_json(ready: Ready) -> str:
    """The same for programs: one object on one line."""
    return json.dumps({"msg": "ready", "version": __version__, "url": ready.url, **asdict(ready)}) + "\n"


def announce(
    config: Config, at: tuple[str, int, tuple[str, ...]], info: EngineInfo, *, model: str, chat: bool,
    started_s: float, workers: int = 1,
) -> None:  # fmt: skip
    """Show what a server is, once it is ready. at: host, port and UNIX sockets, as `listening.addresses` has them."""
    host, port, unix = at
    server = config.server
    ready = Ready(
        host=host or server.host, port=port, unix=unix, model=model, engine=info.engine, device=info.device,
        dtype=info.dtype, max_model_len=info.max_model_len, chat=chat, workers=workers,
        tls=server.tls or ("certificate" if server.tls_cert or server.tls_key else ""),
        started_s=started_s, keys=bool(config.meter.api_keys),
    )  # fmt: skip
    show(ready, format=server.log_format)


def show(ready: Ready, stream: TextIO | None = None, *, format: str = "text") -> None:
    """Print the banner to `stream` (default: stdout), and flush it. A reader that is gone is no reason to stop."""
    stream = stream or sys.stdout
    try:
        if format == "json":
            stream.write(as_json(ready))
        elif stream.isatty():
            _colour(ready, stream)
        else:
            stream.write(plain(ready))
        stream.flush()
    except OSError:
        return


def _colour(ready: Ready, stream: TextIO) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, soft_wrap=True, highlight=False)
    for label, text in lines(ready):
        line = Text.assemble((f"  {label:8}", "dim"), text) if label else Text(text, "bold green")
        console.print(line, soft_wrap=True)
