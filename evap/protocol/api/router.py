"""Which path is what. A route is registered once it works; nothing else is answered.

Rule: only `public` routes may be served without a key (health probes have none).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from evap.errors import MethodNotAllowed, NotFound, echo
from evap.protocol.api.chat import Chat
from evap.protocol.api.completions import Completions
from evap.protocol.api.dialect import Dialect


@dataclass(frozen=True, slots=True)
class Route:
    """name: of the handler, or of the dialect for routes that generate."""

    name: str
    method: str
    public: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """What to do. name "options": answer 204 with `allow`. argument: the decoded rest of the path (a model's id)."""

    name: str
    public: bool = False
    argument: str = ""
    allow: str = ""


ROUTES: Final = {
    "/v1/chat/completions": Route("chat", "POST"),
    "/v1/completions": Route("completions", "POST"),
    "/v1/models": Route("models", "GET"),
    "/v1/usage": Route("usage", "GET"),
    "/health": Route("health", "GET", public=True),
    "/ready": Route("ready", "GET", public=True),
    "/version": Route("version", "GET"),
    "/metrics": Route("metrics", "GET"),
}
#: Prefix -> route whose argument is the rest of the path, slashes included ("org/model").
PREFIXES: Final = {"/v1/models/": Route("model", "GET"), "/v1/usage/": Route("usage_one", "GET")}
#: A part of a streamed answer that was pushed.
BLOCK: Final = re.compile(r"/v1/(?:chat/)?completions/[\w-]{1,64}/blocks/\d{1,4}", re.ASCII).fullmatch
ALLOW: Final = {"POST": "POST, OPTIONS", "GET": "GET, HEAD, OPTIONS"}
#: `OPTIONS *` (RFC 9110 section 9.3.7) asks about the server as a whole.
ALLOW_ANY: Final = "GET, HEAD, POST, OPTIONS"

_EXACT: Final = {(r.method, path): Match(r.name, r.public) for path, r in ROUTES.items()}


def route(method: str, path: str) -> Match:
    """`path`: without the query, percent-encoded as received. HEAD goes where GET goes. Raises NotFound, or
    MethodNotAllowed with the methods that the path has."""
    exact = _EXACT.get((method, path))
    if exact is not None:
        return exact
    if path == "*" and method == "OPTIONS":
        return Match("options", public=True, allow=ALLOW_ANY)
    found, argument = _find(path)
    allow = ALLOW[found.method]
    if method == "OPTIONS":
        return Match("options", public=True, allow=allow)
    if method != found.method and not (method == "HEAD" and found.method == "GET"):
        raise MethodNotAllowed(f"{echo(method)} is not allowed here; {allow} are", allow=allow)
    return Match(found.name, found.public, argument)


def _find(path: str) -> tuple[Route, str]:
    found = ROUTES.get(path)
    if found is not None:
        return found, ""
    for prefix, candidate in PREFIXES.items():
        if path.startswith(prefix) and len(path) > len(prefix):
            try:
                return candidate, unquote_to_bytes(path[len(prefix) :]).decode()
            except UnicodeDecodeError:
                break
    if BLOCK(path) is not None:
        return Route("block", "GET"), ""
    raise NotFound(f"there is no '{echo(path)}' here")


def dialects(*, structured_output: bool = False) -> dict[str, Dialect]:
    """Route name -> dialect, for the routes that generate."""
    return {
        "chat": Chat(structured_output=structured_output),
        "completions": Completions(structured_output=structured_output),
    }
