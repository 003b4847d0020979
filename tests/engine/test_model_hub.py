from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evap.engine.model import no_progress
from evap.engine.model_hub import fetch
from evap.errors import StartupError
from tests.engine import hub_stub
from tests.engine.hub_stub import SHA, Hub

WEIGHTS = bytes(range(256)) * 1000
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "original/params.json": b"{}",
    "README.md": b"hello",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one good model. The client is the real one."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with hub_stub.serve({"org/good": FILES, "org/bare": {"config.json": b"{}", "pytorch_model.bin": b"x"}}) as it:
        monkeypatch.setenv("HF_ENDPOINT", it.url)
        yield it


def test_fetches_what_an_engine_reads(hub: Hub, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    found = fetch("org/good", lambda *a: seen.append(a), cache_dir=tmp_path)
    assert (found.name, found.source) == ("org/good", "hub")
    names = sorted(str(p.relative_to(found.path)) for p in found.path.rglob("*"))
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert (found.path / "model.safetensors").read_bytes() == WEIGHTS
    assert found.path.name == SHA
    assert seen[0][0] == "fetching org/good from the Hugging Face hub"
    assert max(done for what, done, _ in seen if what == "downloading") >= len(WEIGHTS)


def test_cache_is_used_when_the_hub_is_gone(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch("org/good", no_progress, cache_dir=tmp_path)
    assert fetch("org/good", no_progress, cache_dir=tmp_path) == first
    assert sum(1 for m, p in hub.requests if m == "GET" and p.endswith("model.safetensors")) == 1
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    assert fetch("org/good", no_progress, cache_dir=tmp_path) == first


def test_a_revision(hub: Hub, tmp_path: Path) -> None:
    assert fetch("org/good@v1", no_progress, cache_dir=tmp_path).name == "org/good"
    with pytest.raises(StartupError, match="no revision v9"):
        fetch("org/good@v9", no_progress, cache_dir=tmp_path)


def test_a_broken_download_goes_on_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    hub.cut_at = 100_000
    try:
        found = fetch("org/good", no_progress, cache_dir=tmp_path)
    except StartupError:  # a client that does not try again by itself: the user does
        found = fetch("org/good", no_progress, cache_dir=tmp_path)
    assert (found.path / "model.safetensors").read_bytes() == WEIGHTS


def test_no_such_model(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no model org/absent, or it is private") as caught:
        fetch("org/absent", no_progress, cache_dir=tmp_path)
    assert "HF_TOKEN" in caught.value.remedy


def test_gated_and_private_models(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated = {"org/good"}
    hub.token = "hf_test"
    with pytest.raises(StartupError, match="gated") as caught:
        fetch("org/good", no_progress, cache_dir=tmp_path)
    assert "HF_TOKEN" in caught.value.remedy
    hub.gated, hub.private = set(), {"org/good"}
    with pytest.raises(StartupError, match="private"):
        fetch("org/good", no_progress, cache_dir=tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    assert fetch("org/good", no_progress, cache_dir=tmp_path).source == "hub"


def test_a_model_without_safetensors(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"org/bare lacks tokenizer.json, model.safetensors"):
        fetch("org/bare", no_progress, cache_dir=tmp_path)


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StartupError, match="cannot be reached") as caught:
        fetch("org/good", no_progress, cache_dir=tmp_path)
    assert "network" in caught.value.remedy


@pytest.mark.parametrize("name", ["org/..", "org/a--b", "a/b/c"])
def test_names_that_are_no_hub_ids(name: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError):
        fetch(name, no_progress, cache_dir=tmp_path)
