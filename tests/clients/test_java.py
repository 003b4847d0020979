"""java.net.http.HttpClient, which asks for an upgrade to h2c with every first request."""

from __future__ import annotations

from pathlib import Path

from tests.clients.asking import HERE, chat, program, run, said, text_of
from tests.support import Server


def test_upgrade_h2c_is_ignored_and_the_body_is_intact(server: Server, tmp_path: Path) -> None:
    small, large = tmp_path / "small.json", tmp_path / "large.json"
    small.write_bytes(chat("java-1", 60))
    large.write_bytes(chat("java-2", 60) + b" " * (2 << 20))
    out = run(program("java"), str(HERE / "H2cUpgrade.java"), server.url, str(small), str(large)).stdout
    first, second, _ = out.split(b"\0\n")
    for answer, word in ((first, "java-1"), (second, "java-2")):
        status, _, body = answer.partition(b"\n")
        assert status == b"200 HTTP_1_1"
        assert text_of(body) == said(word, 60)
