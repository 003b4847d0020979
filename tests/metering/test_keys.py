"""The key file: what people type, what is refused, and what a change leaves alone."""

from __future__ import annotations

import stat
from hashlib import sha256
from pathlib import Path

import pytest

from evap.errors import StartupError
from evap.metering import keys


def test_a_secret_opens_its_key_and_is_not_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    secret = keys.create(path, "alice", {"tokens_per_day": 100, "models": ("m",), "admin": True})
    other = keys.create(path, "bob", {})
    assert secret.startswith("sk-evap-")
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ring = keys.read(path)
    alice = ring.check(secret.encode())
    assert alice is not None
    assert (alice.id, alice.tokens_per_day, alice.models, alice.admin) == ("alice", 100, ("m",), True)
    bob = ring.check(other.encode())
    assert bob is not None
    assert bob.id == "bob"
    for wrong in (b"", b"x" * 10_000, secret[:-1].encode(), secret.encode() + b" "):
        assert ring.check(wrong) is None


def test_a_hash_that_begins_alike_is_not_enough(tmp_path: Path) -> None:
    """The key is found by 8 bytes of the hash and then compared whole."""
    path = tmp_path / "keys.toml"
    digest = sha256(b"secret").hexdigest()
    path.write_text(f'[keys.a]\nhash = "sha256:{digest[:16]}{"0" * 48}"\n')
    assert keys.read(path).check(b"secret") is None


def test_revoking_keeps_comments_and_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    alice = keys.create(path, "alice", {})
    bob = keys.create(path, "bob", {"priority": 2})
    path.write_text("# our keys\n" + path.read_text())
    keys.revoke(path, "alice")
    keys.revoke(path, "alice")
    ring = keys.read(path)
    assert ring.check(alice.encode()) is None
    assert ring.check(bob.encode()) is not None
    assert path.read_text().startswith("# our keys\n")
    with pytest.raises(StartupError, match="has a key 'alice' already"):
        keys.create(path, "alice", {})
    with pytest.raises(StartupError, match="no key 'carol'"):
        keys.revoke(path, "carol")


def test_revoking_one_that_says_it_is_not_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    secret = keys.create(path, "alice", {})
    path.write_text(path.read_text() + "revoked = false # yet\n")
    keys.revoke(path, "alice")
    assert keys.read(path).check(secret.encode()) is None


HASH = f'hash = "sha256:{"0" * 64}"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[keys.a", "not valid TOML"),
        ("[other]\nx = 1", "unknown table other"),
        ("keys = 3", "table of tables"),
        (f'[keys."a b"]\n{HASH}', "no key name"),
        ("[keys.a]\n", "hash"),
        ('[keys.a]\nhash = "md5:00"', "not sha256:HEX"),
        (f"[keys.a]\n{HASH}\ntokens_per_day = -1", "tokens_per_day is negative"),
        (f"[keys.a]\n{HASH}\ntokens_per_dya = 1", "tokens_per_dya"),
        (f'[keys.a]\n{HASH}\npriority = "high"', "priority"),
        (f"[keys.a]\n{HASH}\n[keys.b]\n{HASH}", "same hash"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(StartupError, match=message) as error:
        keys.read(path)
    assert str(path) in error.value.message


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as error:
        keys.read(tmp_path / "absent")
    assert "keys create" in error.value.remedy


def test_a_bad_change_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys.create(path, "alice", {})
    before = path.read_text()
    with pytest.raises(StartupError, match="no key name"):
        keys.create(path, "a/b", {})
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["keys.toml"]
