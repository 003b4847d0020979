"""Compiles `kernels.cu`: cubins and PTX for GPUs (nvcc or the NVRTC wheel), and a shared library for the CPU.

    python -m evap.metering.build              all that can be built here, into the cache directory
    python -m evap.metering.build --out DIR    the device code into DIR
    python -m evap.metering.build --host       the CPU library only

Nothing here needs a GPU. Files are cached by the hash of their sources, flags and compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
KERNELS: Final = HERE / "kernels.cu"
SHIM: Final = HERE / "cuda_shim.h"
#: Cubins for the machines named; PTX for what comes after them.
ARCHITECTURES: Final = ("sm_80", "sm_90", "compute_90")
_HOST_FLAGS: Final = ("-std=c++20", "-O2", "-DEVAP_CPU", "-shared", "-fPIC", "-x", "c++")
_DEVICE_FLAGS: Final = ("-std=c++17",)
_BUILD_TIMEOUT_S: Final = 300

#: Source text, architecture -> object code. Raises BuildError with the compiler's own words.
DeviceCompiler = Callable[[str, str], bytes]


class BuildError(Exception):
    """No compiler, or it refused the source; the message is for people."""


def cache_directory() -> Path:
    """EVAP_CACHE_DIR, or evap under XDG_CACHE_HOME or ~/.cache; then `metering`."""
    own, xdg = os.environ.get("EVAP_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    root = Path(own) if own else (Path(xdg) if xdg else Path.home() / ".cache") / "evap"
    return root / "metering"


def host_compiler() -> str | None:
    """CXX, or the first C++ compiler on the path; None without one."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    return None


def host_library() -> Path:
    """The kernels as a library for this CPU, from the cache or built now (about two seconds). Raises BuildError."""
    compiler = host_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found (set CXX, or install g++)")

    def build(to: Path) -> None:
        _run([compiler, *_HOST_FLAGS, "-include", str(SHIM), str(KERNELS), "-o", str(to)])

    key = _key(KERNELS.read_text(), SHIM.read_text(), compiler, *_HOST_FLAGS, _version(compiler))
    return _cached(f"libevap_meter-{key}.so", build)


def device_code(architecture: str, compile_: DeviceCompiler | None = None) -> Path:
    """The cubin (sm_*) or PTX (compute_*), from the cache or built now. Raises BuildError."""
    source = KERNELS.read_text()
    suffix = "ptx" if architecture.startswith("compute") else "cubin"

    def build(to: Path) -> None:
        to.write_bytes((compile_ or device_compiler())(source, architecture))

    return _cached(f"evap_meter-{architecture}-{_key(source, *_DEVICE_FLAGS)}.{suffix}", build)


def device_compiler() -> DeviceCompiler:
    """nvcc if there is one, else NVRTC. Raises BuildError."""
    path = find_nvcc()
    if path is not None:
        return lambda source, architecture: compile_with_nvcc(path, source, architecture)
    library = find_nvrtc()
    if library is not None:
        return lambda source, architecture: compile_with_nvrtc(library, source, architecture)
    raise BuildError("neither nvcc nor NVRTC was found (pip install 'nvidia-cuda-nvrtc==13.0.*' is enough)")


def find_nvcc() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return shutil.which("nvcc") or next(
        (found for home in homes if home and (found := shutil.which("nvcc", path=f"{home}/bin"))), None
    )


def find_nvrtc() -> Path | None:
    """EVAP_NVRTC, or the library of an installed nvidia-cuda-nvrtc (13) or nvidia-cuda-nvrtc-cu12 wheel."""
    own = os.environ.get("EVAP_NVRTC")
    if own:
        return Path(own)
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for part in ("cu13", "cuda_nvrtc"):
            found = sorted(p for p in Path(folder, part, "lib").glob("libnvrtc.so.*") if "builtins" not in p.name)
            if found:
                return found[-1]
    return None


def compile_with_nvcc(nvcc: str, source: str, architecture: str) -> bytes:
    kind = "-ptx" if architecture.startswith("compute") else "-cubin"
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder, "out")
        text = Path(folder, KERNELS.name)
        text.write_text(source)
        _run([nvcc, *_DEVICE_FLAGS, f"-arch={architecture}", kind, str(text), "-o", str(to)])
        return to.read_bytes()


def compile_with_nvrtc(library: Path, source: str, architecture: str) -> bytes:
    """By the C API (https://docs.nvidia.com/cuda/nvrtc); needs no CuPy and no driver."""
    for part in library.parent.glob("libnvrtc-builtins.so.*"):  # NVRTC looks for it by name, not beside itself
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
    lib = ctypes.CDLL(str(library))
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()

    def check(status: int) -> None:
        if status:
            raise BuildError(f"NVRTC: {lib.nvrtcGetErrorString(status).decode()}\n{log()}")

    def fetch(what: str) -> bytes:
        size = ctypes.c_size_t()
        check(getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        data = ctypes.create_string_buffer(size.value)
        check(getattr(lib, f"nvrtcGet{what}")(program, data))
        return data.raw

    def log() -> str:
        size = ctypes.c_size_t()
        if not program or lib.nvrtcGetProgramLogSize(program, ctypes.byref(size)):
            return ""
        data = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, data)
        return data.value.decode(errors="replace")

    check(lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), KERNELS.name.encode(), 0, None, None))
    try:
        options = [o.encode() for o in (*_DEVICE_FLAGS, f"-arch={architecture}")]
        check(lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)))
        if architecture.startswith("compute"):
            return fetch("PTX").rstrip(b"\0")
        return fetch("CUBIN")
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _cached(name: str, build: Callable[[Path], None]) -> Path:
    """The file of that name in the cache, built under another name and moved there whole."""
    path = cache_directory() / name
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, name)
            build(made)
            made.replace(path)
    except OSError as e:
        raise BuildError(f"cannot write to {path.parent}: {e}") from e
    return path


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise BuildError(f"{command[0]}: {e}") from e
    if done.returncode:
        raise BuildError(f"{command[0]} failed:\n{done.stderr}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evap.metering.build", description="Compile the metering kernels.")
    parser.add_argument("--out", type=Path, help="directory for the cubins and PTX (default: the cache only)")
    parser.add_argument("--host", action="store_true", help="build the CPU library only")
    options = parser.parse_args(arguments)
    failed = 0
    jobs: list[tuple[str, Callable[[], Path]]] = [("host", host_library)]
    if not options.host:
        jobs += [(a, functools.partial(device_code, a)) for a in ARCHITECTURES]
    for name, job in jobs:
        try:
            path = job()
        except BuildError as e:
            failed += 1
            sys.stdout.write(f"{name:11} {e}\n")
            continue
        if options.out is not None and name != "host":
            options.out.mkdir(parents=True, exist_ok=True)
            path = Path(shutil.copy(path, options.out / f"evap_meter-{name}{path.suffix}"))
        sys.stdout.write(f"{name:11} {path} ({path.stat().st_size} bytes)\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
