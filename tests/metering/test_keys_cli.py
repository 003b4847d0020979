"""`python -m evap keys`, as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from evap.__main__ import main
from evap.metering import keys


def test_create_list_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "k.toml")
    limits = ("--tokens-per-day", "500", "--max-streams", "3", "--model", "m", "--model", "n")
    assert main(["keys", "create", "alice", "--file", file, *limits]) == 0
    secret = capsys.readouterr().out.strip()
    key = keys.read(Path(file)).check(secret.encode())
    assert key is not None
    assert (key.tokens_per_day, key.max_streams, key.models) == (500, 3, ("m", "n"))
    assert main(["keys", "create", "root", "--admin", "--file", file]) == 0
    assert main(["keys", "revoke", "root", "--file", file]) == 0
    capsys.readouterr()
    assert main(["keys", "list", "--file", file]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "alice                 models=m,n  max_streams=3  tokens_per_day=500",
        "root                  admin  revoked",
    ]


@pytest.mark.parametrize(
    "argv", [["create"], ["list", "x"], ["create", "a", "--tokens-per-day", "many"], ["revoke", "nobody"]]
)
def test_mistakes_end_with_2_and_a_remedy(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["keys", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "try: " in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_no_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "k.toml").write_text("")
    assert main(["keys", "list", "--file", str(tmp_path / "k.toml")]) == 0
    assert capsys.readouterr().out == "no keys\n"
