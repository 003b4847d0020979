"""A certificate that is renewed while the server runs."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx

from evap.protocol.tls import fingerprint, self_signed
from tests.clients.asking import SOON_S, eventually
from tests.support import Server


def _write(directory: Path) -> tuple[Path, Path]:
    files = directory / "cert.pem", directory / "key.pem"
    for path, data in zip(files, self_signed("127.0.0.1"), strict=True):
        fresh = path.with_suffix(".new")
        fresh.write_bytes(data)
        os.replace(fresh, path)
    return files


def _shown(server: Server) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((server.host, server.port), SOON_S) as plain,
        context.wrap_socket(plain) as secured,
    ):
        return fingerprint(ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"").encode())


def test_sighup_takes_the_new_certificate_in_place(start_server: Callable[..., Server], tmp_path: Path) -> None:
    certificate, key = _write(tmp_path)
    first = fingerprint(certificate.read_bytes())
    server = start_server("--tls-cert", str(certificate), "--tls-key", str(key))
    assert _shown(server) == first
    trusting = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(base_url=server.url, verify=trusting, timeout=SOON_S) as client:
        assert client.get("/health").status_code == 200
        _write(tmp_path)
        server.process.send_signal(signal.SIGHUP)
        second = fingerprint(certificate.read_bytes())
        eventually(lambda: _shown(server) == second, "the old certificate is still shown")
        assert client.get("/health").status_code == 200  # this connection goes on
    key.write_text("no key")
    server.process.send_signal(signal.SIGHUP)
    server.wait_log("not reloaded")
    assert _shown(server) == second
