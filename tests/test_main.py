"""The command line as a user meets it: exit codes, one-line errors, help, and what it does not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evap import __main__, __version__
from evap.errors import StartupError


def run(*argv: str) -> int:
    return __main__.main(argv)


@pytest.mark.parametrize("argv", [["version"], ["--version"], ["-V"]])
def test_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 0
    assert capsys.readouterr().out == f"evap {__version__}\n"


@pytest.mark.parametrize("argv", [["-h"], ["--help"], ["help"]])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 0
    out = capsys.readouterr().out
    for name in __main__.COMMANDS:
        assert f"  {name} " in out


def test_no_command_is_an_error_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(__main__.COMMANDS))
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(name, "-h")
    assert stopped.value.code == 0
    assert f"python -m evap {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["srve"], "error: unknown command srve\n  try: did you mean serve?\n"),
        (["serve", "--prot", "1"], "error: unknown flag --prot\n  try: did you mean --port?\n"),
        (["serve", "--max-body=3"], None),  # a name without its unit
        (["serve", "--max-bodies=3"], "error: unknown flag --max-bodies\n  try: did you mean --max-body?\n"),
        (["serve", "--por", "1"], "error: unknown flag --por\n  try: did you mean --port?\n"),
        (["serve", "a", "b"], "error: unexpected argument 'b'\n  try: python -m evap serve --help\n"),
        (["serve", "--port"], "error: --port: expected one argument\n  try: python -m evap serve --help\n"),
        (["version", "x"], "error: unexpected argument 'x'\n  try: python -m evap version --help\n"),
    ],
)
def test_mistakes_are_one_line_and_a_remedy(
    argv: list[str], error: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evap.options.load", stop)
    code = run(*argv)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err == (error or "error: parsed\n")
    assert captured.out == ""


def stop(*_: object) -> None:
    raise StartupError("parsed")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("evap.options.load", interrupt)
    assert run("serve") == 130
    assert capsys.readouterr() == ("", "")


def test_the_exit_code_reaches_the_shell() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "evap", "serve", "--port", "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --port: expected a whole number, got 'x'\n")
    assert done.stdout == ""


HEAVY = ("torch", "vllm", "transformers", "numpy", "huggingface_hub", "rich", "tokenizers", "asyncio", "h2")


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    code = f"import sys, evap.__main__; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_server_starts_without_torch_or_the_hub() -> None:
    heavy = ("torch", "vllm", "transformers", "huggingface_hub")
    code = f"import sys, evap.server; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_model_list(tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EVAP_CACHE_DIR", str(tmp_path))
    assert run("model", "list") == 0
    first = capsys.readouterr().out.splitlines()[0].split()
    assert first[:2] == ["smollm2-135m", "builtin"]
    assert first[2:] == ["not", "fetched"]


def test_model_path_of_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("model", "path", "/nonexistent/model") == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_model_wants_a_known_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("model", "remove") == 2
    assert "invalid choice: 'remove'" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_traceback() -> None:
    shell = f"{sys.executable} -m evap serve --help | head -1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: ")
    assert "Traceback" not in done.stderr
