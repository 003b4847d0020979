"""TLS contexts by real handshakes in memory, and every way in which the files can be wrong."""

from __future__ import annotations

import hashlib
import os
import ssl
import stat
import warnings
from pathlib import Path

import pytest

from evap.config import ServerConfig
from evap.errors import StartupError
from evap.protocol.tls import ALPN, ServerTls, fingerprint, self_signed, server_context


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return _pair(tmp_path, "a")


def _pair(directory: Path, name: str) -> tuple[Path, Path]:
    certificate, key = self_signed("evap.test")
    files = directory / f"{name}.pem", directory / f"{name}.key"
    files[0].write_bytes(certificate)
    files[1].write_bytes(key)
    return files


def _server(pair: tuple[Path, Path], tls_client_ca: str = "") -> ServerConfig:
    return ServerConfig(tls_cert=str(pair[0]), tls_key=str(pair[1]), tls_client_ca=tls_client_ca)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> ssl.SSLObject:
    """The client's side after a handshake in memory. Raises what the client or the server raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=host)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    sides = [near, far]
    for _ in range(10):
        for side in list(sides):
            try:
                side.do_handshake()
                sides.remove(side)
            except ssl.SSLWantReadError:
                continue
        if not sides:
            far.write(b"x")  # TLS 1.3 judges the client's certificate after the client is done
            near.read(1)
            return near
    raise AssertionError("the handshake did not end")


def client(trust: bytes | None = None, alpn: list[str] | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if trust is not None:
        context.load_verify_locations(cadata=trust.decode())
    else:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(ALPN if alpn is None else alpn)
    return context


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "evap.test"])
def test_a_self_signed_certificate_is_valid_for_its_names(host: str, pair: tuple[Path, Path]) -> None:
    trust = pair[0].read_bytes()
    assert handshake(server_context(_server(pair)), client(trust), host).version() == "TLSv1.3"


def test_it_is_valid_for_no_other_name(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server_context(_server(pair)), client(pair[0].read_bytes()), "elsewhere.test")


def test_self_signed_leaves_no_key_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    load = ssl.SSLContext.load_cert_chain

    def watch(context: ssl.SSLContext, path: Path) -> None:
        modes.append(stat.S_IMODE(path.stat().st_mode))
        load(context, path)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watch)
    tls = ServerTls(ServerConfig(tls="self-signed", host="0.0.0.0"))
    assert modes == [0o600]
    assert list(tmp_path.iterdir()) == []
    near = handshake(tls.context, client())
    der = near.getpeercert(binary_form=True)
    assert der is not None
    assert tls.fingerprint.replace(":", "").lower() == hashlib.sha256(der).hexdigest()
    before = tls.fingerprint
    assert tls.reload()
    assert tls.fingerprint == before


@pytest.mark.parametrize(("offer", "chosen"), [(["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1"), (["x"], None)])
def test_alpn(offer: list[str], chosen: str | None, pair: tuple[Path, Path]) -> None:
    assert handshake(server_context(_server(pair)), client(alpn=offer)).selected_alpn_protocol() == chosen


def test_tls_1_2_with_good_suites_only(pair: tuple[Path, Path]) -> None:
    """RFC 9113 9.2.2: the suites of appendix A are not offered; what is left has ephemeral keys and AEAD."""
    context = server_context(_server(pair))
    for suite in context.get_ciphers():
        assert suite["aead"], suite["name"]
        assert suite["protocol"] == "TLSv1.3" or suite["kea"] == "kx-ecdhe", suite["name"]
    old = client()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    near = handshake(context, old)
    assert near.version() == "TLSv1.2"
    assert near.compression() is None
    for cipher in ("AES128-GCM-SHA256", "ECDHE-ECDSA-AES128-SHA256", "DHE-RSA-AES128-GCM-SHA256"):
        old.set_ciphers(cipher)
        with pytest.raises(ssl.SSLError):
            handshake(context, old)


def test_nothing_below_tls_1_2(pair: tuple[Path, Path]) -> None:
    old = client()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError):
        handshake(server_context(_server(pair)), old)


def test_reload_takes_new_files_and_survives_bad_ones(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    tls = ServerTls(_server(pair))
    first, new = tls.fingerprint, _pair(tmp_path, "b")
    assert first == fingerprint(pair[0].read_bytes())
    os.replace(new[0], pair[0])  # the key does not match yet: half of a renewal
    assert not tls.reload()
    assert tls.fingerprint == first
    near = handshake(tls.context, client())
    assert ssl.DER_cert_to_PEM_cert(near.getpeercert(binary_form=True) or b"")
    os.replace(new[1], pair[1])
    assert tls.reload()
    assert tls.fingerprint == fingerprint(pair[0].read_bytes()) != first
    der = handshake(tls.context, client()).getpeercert(binary_form=True)
    assert fingerprint(ssl.DER_cert_to_PEM_cert(der or b"").encode()) == tls.fingerprint


def test_client_certificates(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    theirs = _client_pair(tmp_path)
    context = server_context(_server(pair, tls_client_ca=str(theirs[0])))
    with pytest.raises(ssl.SSLError):
        handshake(context, client())
    known = client()
    known.load_cert_chain(*theirs)
    assert handshake(context, known).version() == "TLSv1.3"


def _client_pair(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate without the server-only usage."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "client")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    files = directory / "client.pem", directory / "client.key"
    files[0].write_bytes(made.public_bytes(pem))
    files[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return files


# What can be wrong


def failure(server: ServerConfig) -> StartupError:
    with pytest.raises(StartupError) as caught:
        server_context(server)
    assert caught.value.remedy
    return caught.value


def test_missing_files_are_named(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    gone = tmp_path / "gone.pem"
    assert str(gone) in failure(_server((gone, pair[1]))).message
    error = failure(_server((pair[0], gone)))
    assert "--tls-key" in error.message
    assert str(gone) in error.message
    assert "--tls-client-ca" in failure(_server(pair, tls_client_ca=str(gone))).message
    assert "directory" in failure(_server((tmp_path, pair[1]))).message.lower()


def test_an_unreadable_file(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def deny(path: Path) -> bytes:
        if path.suffix == ".key":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", deny)  # root may read everything
    assert "cannot be read by this user" in failure(_server(pair)).message


def test_a_key_of_another_certificate(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    assert "does not belong" in failure(_server((pair[0], _pair(tmp_path, "b")[1]))).message


def test_files_that_are_no_pem(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    junk = tmp_path / "junk"
    junk.write_bytes(b"\x30\x82 DER?")
    assert "no certificate in PEM" in failure(_server((junk, pair[1]))).message
    assert "cannot be used" in failure(_server((pair[0], junk))).message
    assert "no certificate in PEM" in failure(_server(pair, tls_client_ca=str(junk))).message


def test_an_encrypted_key_is_not_asked_for(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(pair[1].read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
        )
    )
    assert "encrypted" in failure(_server((pair[0], locked))).message
