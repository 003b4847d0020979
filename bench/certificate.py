"""A certificate for the TLS rows, made by the same code as `--tls self-signed`, as files that every peer can read."""

from __future__ import annotations

from pathlib import Path

from evap.protocol.tls import self_signed


def write(folder: Path) -> tuple[Path, Path]:
    """(certificate, key) in `folder`; made once."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    if not certificate.exists():
        pem, private = self_signed("127.0.0.1")
        key.write_bytes(private)
        certificate.write_bytes(pem)
    return certificate, key
