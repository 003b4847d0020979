"""The key file: TOML, one table for each key, secrets as hashes.

    [keys.alice]
    hash = "sha256:9f86d0..."
    models = ["*"]              # or the names that it may use
    requests_per_minute = 60    # these: no limit if left out
    tokens_per_minute = 100_000
    max_streams = 8
    tokens_per_day = 1_000_000
    tokens_per_month = 20_000_000
    priority = 0                # lower is sooner
    most_urgent = 0             # lowest u= of a priority header that its requests may claim
    admin = false               # sees everybody's usage
    revoked = false

A secret is 256 random bits, so that its plain SHA-256 cannot be searched for. It is found by its hash, and the hash is
then compared in constant time: how long a refusal takes says nothing about any key.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import tempfile
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgspec

from evap.errors import StartupError, echo
from evap.metering.accounts import Key, Rights

PREFIX: Final = "sk-evap-"
MAX_SECRET_BYTES: Final = 512
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}").fullmatch
_HASH = re.compile(r"sha256:([0-9a-f]{64})").fullmatch
_SMALL: Final = 8  # bytes of a hash by which a key is found


class _Table(Rights, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A [keys.NAME] table, as it is typed by people."""

    hash: str
    revoked: bool = False


class KeyRing:
    """The keys that are not revoked."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self.keys = dict(keys)
        self._found = {key.hash[:_SMALL]: key for key in keys.values()}

    def check(self, secret: bytes) -> Key | None:
        """The key of a secret, or None."""
        digest = sha256(secret[:MAX_SECRET_BYTES]).digest()
        key = self._found.get(digest[:_SMALL])
        same = hmac.compare_digest(digest, key.hash if key is not None else digest[::-1])
        return key if same else None


def read(path: Path) -> KeyRing:
    """Raises StartupError, with the place, for a file that is missing or not as above."""
    return KeyRing({name: _key(name, table) for name, table in tables(path).items() if not table.revoked})


def tables(path: Path) -> dict[str, _Table]:
    """Every key of the file, revoked ones too. Raises StartupError."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise StartupError(
            f"cannot read the key file {path}: {error.strerror}",
            remedy=f"python -m evap keys create NAME --file {path}",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not valid TOML: {error}") from error
    if extra := [echo(name) for name in data if name != "keys"]:
        raise StartupError(f"{path}: unknown table {extra[0]}", remedy="keys are tables named [keys.NAME]")
    found = data.get("keys", {})
    if not isinstance(found, dict):
        raise StartupError(f"{path}: keys is a table of tables", remedy="[keys.NAME]")
    checked = {name: _table(path, name, fields) for name, fields in found.items()}
    if len({t.hash for t in checked.values()}) != len(checked):
        raise StartupError(f"{path}: two keys have the same hash", remedy="python -m evap keys create makes a new one")
    return checked


def _table(path: Path, name: str, fields: Any) -> _Table:
    if not _NAME(name):
        raise StartupError(f"{path}: {echo(name)!r} is no key name", remedy="letters, digits, - and _, at most 64")
    try:
        table = msgspec.convert(fields, _Table)
    except msgspec.ValidationError as error:
        raise StartupError(f"{path}: [keys.{name}]: {error}", remedy="docs/metering.md lists the settings") from None
    if not _HASH(table.hash):
        raise StartupError(f"{path}: [keys.{name}]: hash is not sha256:HEX", remedy="python -m evap keys create NAME")
    negative = [n for n in _LIMITS if getattr(table, n) < 0]
    if negative:
        raise StartupError(f"{path}: [keys.{name}]: {negative[0]} is negative", remedy="leave it out for no limit")
    return table


_LIMITS: Final = (
    "requests_per_minute", "tokens_per_minute", "max_streams", "tokens_per_day", "tokens_per_month",
)  # fmt: skip


def _key(name: str, table: _Table) -> Key:
    fields = {n: getattr(table, n) for n in Rights.__struct_fields__}
    return Key(id=name, hash=bytes.fromhex(table.hash.removeprefix("sha256:")), **fields)


# Changing the file


def create(path: Path, name: str, settings: Mapping[str, object]) -> str:
    """Add a key to the file (made if there is none); its secret, which is nowhere else. Raises StartupError."""
    if not _NAME(name):
        raise StartupError(f"{echo(name)!r} is no key name", remedy="letters, digits, - and _, at most 64")
    text = path.read_text() if path.exists() else ""
    if path.exists() and name in tables(path):
        raise StartupError(f"{path} has a key '{name}' already", remedy="choose another name, or revoke that one")
    secret = PREFIX + secrets.token_urlsafe(32)
    lines = [f"[keys.{name}]", f'hash = "sha256:{sha256(secret.encode()).hexdigest()}"']
    lines += [f"{setting} = {_toml(value)}" for setting, value in settings.items()]
    _replace(path, text + ("\n" if text else "") + "\n".join(lines) + "\n")
    return secret


def revoke(path: Path, name: str) -> None:
    """Mark a key as revoked; what the file says else stays as it is. Raises StartupError."""
    known = tables(path)
    if name not in known:
        raise StartupError(f"{path} has no key '{echo(name)}'", remedy="python -m evap keys list shows them")
    if known[name].revoked:
        return
    head = re.compile(rf"^\s*\[\s*keys\s*\.\s*[\"']?{re.escape(name)}[\"']?\s*\][^\n]*$", re.MULTILINE)
    body = re.sub(r"(?m)^\s*revoked\s*=\s*false\s*(#.*)?\n", "", path.read_text()) if _says_false(path, name) else None
    text = path.read_text() if body is None else body
    changed, count = head.subn(lambda m: m[0] + "\nrevoked = true", text, count=1)
    if not count:
        raise StartupError(f"{path} is written in a way that cannot be edited", remedy=f"add revoked = true to {name}")
    _replace(path, changed)


def _says_false(path: Path, name: str) -> bool:
    return "revoked" in tomllib.loads(path.read_text())["keys"][name]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return str(value) if isinstance(value, int) else msgspec.json.encode(str(value)).decode()


def _replace(path: Path, text: str) -> None:
    """The whole file or the old one, never half; readable by its owner only. Raises StartupError if it would be bad."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mode 0600
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        tables(Path(draft))
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
