from __future__ import annotations

import io
from pathlib import Path

import pytest

from evap.engine import model_cli
from evap.engine.model import DEFAULT_MODEL
from evap.engine.model_cli import console_progress, list_models, path, pull
from tests.engine.test_model import WHOLE, write


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(model_cli, "_hub_models", list)


def test_built_ins_are_listed_before_they_are_fetched() -> None:
    (entry,) = list_models()
    assert (entry.name, entry.source, entry.path, entry.size_bytes, entry.default) == (
        DEFAULT_MODEL,
        "builtin",
        None,
        0,
        True,
    )


def test_a_fetched_built_in_has_a_place_and_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evap.engine.model_builtin.is_ready", lambda name: True)
    made = tmp_path / "cache" / "models" / DEFAULT_MODEL
    made.parent.mkdir(parents=True)
    write(made, *WHOLE)
    (entry,) = list_models()
    assert entry.path == made
    assert entry.size_bytes == 6


def test_models_of_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    import huggingface_hub

    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / ("a" * 40)
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "blobs" / "b1").write_text("{}")
    (snapshot / "config.json").symlink_to(repo / "blobs" / "b1")
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path / "hub"))
    found = [e for e in list_models() if e.source == "hub"]
    assert [(e.name, e.path, e.size_bytes) for e in found] == [("org/name", snapshot, 2)]
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path / "absent"))
    assert [e for e in list_models() if e.source == "hub"] == []


def test_pull_and_path(tmp_path: Path) -> None:
    made = write(tmp_path / "m", *WHOLE)
    assert pull(str(made)).path == made.resolve()
    assert path(str(made)) == made.resolve()


def test_progress_without_a_terminal_is_a_line_for_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with console_progress() as report:
        report("downloading", 0, 0)
        for n in range(3):
            report("converting weights", n, 3)
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["downloading", "converting weights"]
    assert captured.out == ""  # `evap model path` is read by scripts


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with console_progress() as report:
        report("converting weights", 1, 2)
        report("converting weights", 2, 2)
    assert "100%" in screen.getvalue()
