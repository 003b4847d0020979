"""Routes: what is there, with which methods, and what needs a key."""

from __future__ import annotations

import pytest

from evap.errors import MethodNotAllowed, NotFound
from evap.protocol.api.router import ALLOW, ROUTES, Match, dialects, route


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_with_every_method(path: str) -> None:
    wanted = ROUTES[path]
    assert route(wanted.method, path) == Match(wanted.name, wanted.public)
    assert route("OPTIONS", path) == Match("options", public=True, allow=ALLOW[wanted.method])
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "get", "BREW", ""):
        if method == wanted.method or (method == "HEAD" and wanted.method == "GET"):
            assert route(method, path).name == wanted.name
            continue
        with pytest.raises(MethodNotAllowed) as caught:
            route(method, path)
        assert caught.value.allow == ALLOW[wanted.method]


def test_only_probes_are_public() -> None:
    assert {path for path, r in ROUTES.items() if r.public} == {"/health", "/ready"}
    assert not route("GET", "/v1/models/x").public


@pytest.mark.parametrize(
    ("path", "id"),
    [
        ("/v1/models/m", "m"),
        ("/v1/models/org/model", "org/model"),
        ("/v1/models/org%2Fmodel", "org/model"),
        ("/v1/models/%C3%A9%20a", "\u00e9 a"),
        ("/v1/models/a%", "a%"),
        ("/v1/models//", "/"),
    ],
)
def test_model_ids(path: str, id: str) -> None:
    for method in ("GET", "HEAD"):
        assert route(method, path) == Match("model", argument=id)


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "*", "/v1", "/v1/", "/v1/models/", "/v1/models/%FF", "/v1/chat/completions/", "/V1/models", "//health",
        "/health/../version", "/v1/chat%2Fcompletions", "/invocations", "/tokenize", "/docs", "/openapi.json",
        "/x" * 5000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_nothing_else_is_there(method: str, path: str) -> None:
    if (method, path) == ("OPTIONS", "*"):
        assert route(method, path).allow == "GET, HEAD, POST, OPTIONS"
        return
    with pytest.raises(NotFound) as caught:
        route(method, path)
    assert len(caught.value.message) < 100


def test_a_long_method_is_cut() -> None:
    with pytest.raises(MethodNotAllowed) as caught:
        route("M" * 5000, "/health")
    assert len(caught.value.message) < 150


def test_every_generating_route_has_a_dialect() -> None:
    assert set(dialects()) == {r.name for r in ROUTES.values() if r.method == "POST"}
