"""The doctor's report: right marks, a remedy beside whatever is bad, and the exit code."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from evap import doctor, options
from evap.doctor import BAD, NOTE, OK, Check
from evap.engine import choose
from evap.errors import StartupError
from evap.options import Settings


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAP_CACHE_DIR", str(tmp_path))


def settings(**flags: Any) -> Settings:
    return options.load({"port": "0", **flags}, {})


def report(given: Settings) -> dict[str, Check]:
    return {check.about: check for check in doctor.checks(given)}


def answers(stdout: str = "", stderr: str = "", code: int = 0) -> Any:
    return lambda: subprocess.CompletedProcess([], code, stdout, stderr)


def test_the_synthetic_engine_needs_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "installed", lambda package: False)
    monkeypatch.setattr(doctor, "_version", lambda package: None if package in ("torch", "vllm") else "1")
    assert doctor.run(settings(engine="synthetic")) == 0
    out = capsys.readouterr().out
    assert "option      engine from --engine" in out
    assert "note  torch       not installed (and not needed)" in out
    assert out.endswith("serve should start\n")


def test_a_missing_engine_is_bad(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(engine: str) -> str:
        raise StartupError("no engine is installed", remedy="pip install 'evap[torch]'")

    monkeypatch.setattr(choose, "choose", missing)
    monkeypatch.setattr(choose, "installed", lambda package: False)
    assert doctor.run(settings()) == 1
    out = capsys.readouterr().out
    assert "BAD   engine      no engine is installed\n                  try: pip install 'evap[torch]'" in out
    assert out.endswith("serve will not start: 1 to mend\n")


def test_a_taken_port_is_bad() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check = doctor._port(settings(port=str(taken.getsockname()[1])).config)
    assert (check.mark, "in use" in check.found, check.remedy) == (BAD, True, "--port 0 picks a free one")
    assert doctor._port(settings().config).mark == OK
    assert doctor._port(settings(host="no.such.host.invalid").config).mark == BAD


@pytest.mark.parametrize(
    ("given", "mark"),
    [({"engine": "synthetic"}, OK), ({"model": ""}, NOTE), ({"model": "owner/name"}, NOTE), ({"model": "."}, BAD)],
)
def test_the_model(given: dict[str, str], mark: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    check = doctor._model(settings(**given).config, given.get("engine", "torch"))
    assert check.mark == mark


def test_torch_is_asked_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "installed", lambda package: True)
    facts = '{"version": "2.13.0", "threads": 2, "gpus": ["H200"]}'
    assert [c.mark for c in doctor._torch("torch", answers(facts))] == [OK, OK]
    assert [c.mark for c in doctor._torch("torch", answers(facts.replace('"H200"', "")))] == [OK, NOTE]
    (crashed,) = doctor._torch("torch", answers(stderr="Traceback\nImportError: libcudart.so", code=1))
    assert (crashed.mark, crashed.found) == (BAD, "does not start: ImportError: libcudart.so")
    (silent,) = doctor._torch("vllm", answers(code=-11))
    assert (silent.mark, silent.found) == (NOTE, "does not start: exit code -11")


def test_torch_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> Any:
        raise subprocess.TimeoutExpired([], 120)

    monkeypatch.setattr(choose, "installed", lambda package: True)
    (check,) = doctor._torch("torch", ask)
    assert check.mark == BAD


def test_a_missing_library_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._libraries().mark == OK
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "h2" else "1")
    check = doctor._libraries()
    assert (check.mark, check.found) == (BAD, "missing: h2")


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._disk().mark in (OK, NOTE)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    check = doctor._disk()
    assert (check.mark, "not writable" in check.found) == (NOTE, True)


def test_every_subject_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = '{"version": "2", "threads": 1, "gpus": []}'
    monkeypatch.setattr(doctor, "_ask_torch", answers(facts))
    monkeypatch.setattr(choose, "installed", lambda package: True)
    subjects = {"evap", "libraries", "processors", "address", "engine", "model", "cache", "torch", "CUDA", "vllm"}
    assert subjects <= set(report(settings()))
