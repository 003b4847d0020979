"""The kernels compile for every GPU named, without one; the device never loads host memory; the cache is honest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evap.metering import build


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVAP_CACHE_DIR", str(tmp_path))
    return tmp_path / "metering"


@pytest.fixture
def compilers() -> list[build.DeviceCompiler]:
    found: list[build.DeviceCompiler] = []
    nvcc, nvrtc = build.find_nvcc(), build.find_nvrtc()
    if nvcc is not None:
        found.append(lambda source, arch: build.compile_with_nvcc(nvcc, source, arch))
    if nvrtc is not None:
        found.append(lambda source, arch: build.compile_with_nvrtc(nvrtc, source, arch))
    if not found:
        pytest.skip("neither nvcc nor the NVRTC wheel is installed: the device code was not compiled")
    return found


@pytest.mark.parametrize("architecture", build.ARCHITECTURES)
def test_device_code_compiles(compilers: list[build.DeviceCompiler], architecture: str) -> None:
    for compile_ in compilers:
        code = compile_(build.KERNELS.read_text(), architecture)
        if architecture.startswith("compute"):
            check_ptx(code.decode())
        else:
            assert code.startswith(b"\x7fELF")
            for name in (b"meter_begin", b"meter_step", b"meter_step_i64", b"render_rows"):
                assert name in code


def check_ptx(ptx: str) -> None:
    """Stores to the host are single system-scope words, fences the cheap kind; nothing is loaded at system scope."""
    entries = re.findall(r"\.entry (\w+)\((.*?)\n}", ptx, re.DOTALL)
    assert sorted(name for name, _ in entries) == ["meter_begin", "meter_step", "meter_step_i64", "render_rows"]
    for name, body in entries:
        assert body.count("fence.acq_rel.sys") == (1 if name.startswith("meter_step") else 0)
        assert "fence.sc" not in body
        assert "membar" not in body
        assert not re.search(r"ld\.(relaxed|acquire|volatile)[.\w]*\.sys|ld\.volatile", body)
        stores = body.count("st.relaxed.sys.u64")
        assert stores == {"meter_begin": 8, "render_rows": 0}.get(name, stores)
    assert dict(entries)["meter_step"].count("st.relaxed.sys.u64") >= 8 + 4 + 1 + 8


def test_the_compilers_own_words_are_in_the_error(compilers: list[build.DeviceCompiler]) -> None:
    for compile_ in compilers:
        with pytest.raises(build.BuildError, match="nonsense"):
            compile_("nonsense;", "sm_90")


def test_host_library_is_built_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if build.host_compiler() is None:
        pytest.skip("no C++ compiler")
    runs: list[list[str]] = []

    def fake(command: list[str]) -> str:
        runs.append(command)
        if "-o" in command:
            Path(command[command.index("-o") + 1]).write_bytes(b"library")
        return "version 1"

    monkeypatch.setattr(build, "_run", fake)
    path = build.host_library()
    assert path == build.host_library()
    assert path.read_bytes() == b"library"
    assert sum("-o" in command for command in runs) == 1
    assert [p.name for p in cache.iterdir()] == [path.name]
    monkeypatch.setattr(build, "_version", lambda compiler: "version 2")
    assert build.host_library() != path


def test_without_compilers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(build, "host_compiler", lambda: None)
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(build, "find_nvrtc", lambda: None)
    with pytest.raises(build.BuildError, match="C\\+\\+ compiler"):
        build.host_library()
    with pytest.raises(build.BuildError, match="pip install"):
        build.device_code("sm_90")


def test_a_cache_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVAP_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match="cannot write"):
        build.device_code("sm_90", lambda source, architecture: b"code")


def test_command_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "device_compiler", lambda: lambda source, architecture: architecture.encode())
    monkeypatch.setattr(build, "host_library", lambda: build.KERNELS)
    assert build.main(["--out", str(tmp_path / "out")]) == 0
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["evap_meter-compute_90.ptx", "evap_meter-sm_80.cubin", "evap_meter-sm_90.cubin"]
    assert "sm_90" in capsys.readouterr().out

    def broken() -> build.DeviceCompiler:
        raise build.BuildError("none here")

    monkeypatch.setenv("EVAP_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(build, "device_compiler", broken)
    assert build.main([]) == 1
    assert "none here" in capsys.readouterr().out


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVAP_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert build.cache_directory() == Path("/x/evap/metering")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_directory() == Path.home() / ".cache/evap/metering"


def test_nvrtc_is_found_where_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAP_NVRTC", "/y/libnvrtc.so.13")
    assert build.find_nvrtc() == Path("/y/libnvrtc.so.13")
