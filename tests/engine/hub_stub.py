"""The part of the Hugging Face hub's API that downloads use, on loopback: revision, tree, resolve with ranges."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = "1234567890abcdef1234567890abcdef12345678"


class Hub:
    """repos: "org/name" -> file -> bytes. gated, private: repos that need `token`. requests: (method, path) seen."""

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        self.repos = repos
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.token = ""
        self.url = ""
        self.requests: list[tuple[str, str]] = []
        self.cut_at: int | None = None  #: break the first download of a large file off after so many bytes

    def refusal(self, repo: str, authorization: str) -> tuple[int, str] | None:
        known = repo in self.repos
        allowed = bool(self.token) and authorization == f"Bearer {self.token}"
        if not known or (repo in self.private and not allowed):
            return 401, "RepoNotFound"
        if repo in self.gated and not allowed:
            return 403, "GatedRepo"
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)(/.*)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        if match is None:
            return self.reply(404, {}, b"{}")
        repo = match.group(1)
        revision = match.group(3) if api else match.group(2)
        refusal = self.hub.refusal(repo, self.headers.get("Authorization", ""))
        if refusal is not None and not (api and refusal[1] == "GatedRepo"):
            return self.reply(refusal[0], {"X-Error-Code": refusal[1], "X-Error-Message": refusal[1]}, b"{}")
        if revision not in ("main", SHA, "v1"):
            return self.reply(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
        if file is not None:
            return self.send_file(self.hub.repos[repo], file.group(3))
        files = self.hub.repos[repo]
        if match.group(2) == "revision":
            names = [{"rfilename": name} for name in files]
            body: Any = {"id": repo, "modelId": repo, "sha": SHA, "siblings": names, "private": False, "tags": []}
        else:
            body = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha256(d).hexdigest()}
                for n, d in files.items()
            ]
        return self.reply(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def send_file(self, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            return self.reply(404, {"X-Error-Code": "EntryNotFound"}, b"")
        data = files[name]
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": SHA,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        status, start = 200, 0
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted:
            start = int(wanted.group(1))
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET" and self.hub.cut_at is not None and len(data) > self.hub.cut_at:
            cut, self.hub.cut_at = self.hub.cut_at, None
            self.reply(status, headers, data[start:], cut)
            self.close_connection = True
            return None
        return self.reply(status, headers, data[start:])

    def reply(self, status: int, headers: dict[str, str], body: bytes, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])


@contextlib.contextmanager
def serve(repos: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    hub = Hub(repos)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
