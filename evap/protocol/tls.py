"""TLS for servers: contexts that meet RFC 9113 9.2, certificates that can be replaced while running.

A shell: it reads files and owns `ssl`. Everything that a user can get wrong becomes a StartupError with a remedy.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import logging
import os
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn, TypeVar

from evap.config import ServerConfig
from evap.errors import StartupError

T = TypeVar("T")
logger = logging.getLogger("evap.tls")

ALPN: Final = ["h2", "http/1.1"]
#: TLS 1.2 suites that are not on the block list of RFC 9113 appendix A: ephemeral keys and AEAD only.
CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
SELF_SIGNED_DAYS: Final = 90


class ServerTls:
    """The context that connections are accepted with, and where its certificate comes from.

    context: give it to the listener; `reload` changes it in place, for handshakes that begin later.
    fingerprint: SHA-256 of the certificate in force, as `AB:CD:...`, to compare with what a client shows.
    """

    def __init__(self, server: ServerConfig, pair: tuple[bytes, bytes] | None = None) -> None:
        """Raises StartupError for files that are missing, unreadable, no PEM, or do not belong together.

        pair: what `self_signed` has made for another process of this server.
        """
        self._server = server
        self._self_signed = pair or (self_signed(server.host) if server.tls == "self-signed" else None)
        self.context = self._new_context()
        self.fingerprint = self._load(self.context)

    def reload(self) -> bool:
        """Read the files again (SIGHUP). False, and nothing changes, when they cannot be used; the log says why.

        Running connections keep the certificate that they have. A self-signed one is kept until the process ends.
        """
        try:
            # A context that has refused a pair may be left with half of it: try the files elsewhere first.
            self._load(self._new_context())
            self.fingerprint = self._load(self.context)
        except StartupError as error:
            logger.error("the certificate was not reloaded: %s", error.message)
            return False
        logger.info("certificate in force: SHA-256 %s", self.fingerprint)
        return True

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
        context.set_alpn_protocols(ALPN)
        if self._server.tls_client_ca:
            ca = self._server.tls_client_ca
            _with_files(lambda: context.load_verify_locations(cafile=ca), "--tls-client-ca", ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _load(self, context: ssl.SSLContext) -> str:
        if self._self_signed is not None:
            certificate, key = self._self_signed
            with tempfile.TemporaryDirectory(prefix="evap-tls-") as directory:  # mode 0700; ssl reads only files
                path = Path(directory, "pair.pem")
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(key + certificate)
                context.load_cert_chain(path)
            return fingerprint(certificate)
        certificate_file, key_file = self._server.tls_cert, self._server.tls_key
        pem = _with_files(Path(certificate_file).read_bytes, "--tls-cert", certificate_file)
        _with_files(Path(key_file).read_bytes, "--tls-key", key_file)
        try:
            context.load_cert_chain(certificate_file, key_file, password=_no_password)
        except ssl.SSLError as error:
            _explain(error, pem, certificate_file, key_file)
        return fingerprint(pem)


def server_context(server: ServerConfig) -> ssl.SSLContext:
    """The context of `ServerTls`, for whoever needs no reload. Raises StartupError."""
    return ServerTls(server).context


def fingerprint(pem: bytes) -> str:
    """SHA-256 of the first certificate in `pem`, in the form that `openssl x509 -fingerprint` prints."""
    text = pem.decode("ascii", "replace")
    start = text.index(ssl.PEM_HEADER)
    end = text.index(ssl.PEM_FOOTER, start) + len(ssl.PEM_FOOTER)
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[start:end])).hexdigest().upper()
    return ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))


def self_signed(host: str) -> tuple[bytes, bytes]:
    """(certificate, private key) in PEM for localhost, both loopback addresses and `host`: EC P-256, 90 days."""
    from cryptography import x509  # noqa: PLC0415 - not loaded when files are given
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "evap development certificate")])
    now = datetime.datetime.now(datetime.UTC)
    names: dict[str, x509.GeneralName] = {}
    for value in ("localhost", "127.0.0.1", "::1", host):
        try:
            names[value] = x509.IPAddress(ipaddress.ip_address(value))
        except ValueError:
            if value.isascii() and value:
                names[value] = x509.DNSName(value)
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign", "crl_sign",
         "encipher_only", "decipher_only"), False,
    )  # fmt: skip
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=SELF_SIGNED_DAYS))
        .add_extension(x509.SubjectAlternativeName(names.values()), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, **usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem), private


def _no_password() -> str:
    """Without this, OpenSSL would ask for one on the terminal and the server would hang."""
    raise StartupError(
        "the private key is encrypted", remedy="openssl pkey -in KEY -out PLAIN makes a plain copy for --tls-key"
    )


def _with_files(read: Callable[[], T], option: str, path: str) -> T:
    try:
        return read()
    except FileNotFoundError:
        raise StartupError(f"{option}: there is no file {path}", remedy=f"check the path given to {option}") from None
    except PermissionError:
        raise StartupError(
            f"{option}: {path} cannot be read by this user", remedy=f"chown or chmod {path}, or run as its owner"
        ) from None
    except ssl.SSLError:
        raise StartupError(f"{option}: {path} has no certificate in PEM", remedy="give a PEM file") from None
    except OSError as error:
        raise StartupError(f"{option}: {path}: {error.strerror or error}", remedy="give a PEM file") from None


def _explain(error: ssl.SSLError, pem: bytes, certificate_file: str, key_file: str) -> NoReturn:
    if error.reason == "KEY_VALUES_MISMATCH":
        raise StartupError(
            f"the key in {key_file} does not belong to the certificate in {certificate_file}",
            remedy="give the key that the certificate was made for; its certificate comes first in that file",
        ) from None
    if ssl.PEM_HEADER.encode() not in pem:
        raise StartupError(
            f"--tls-cert: {certificate_file} has no certificate in PEM", remedy="openssl x509 -in FILE -out cert.pem"
        ) from None
    raise StartupError(
        f"--tls-cert {certificate_file} and --tls-key {key_file} cannot be used: {error.reason or error}",
        remedy="both must be PEM files, the key unencrypted",
    ) from None
