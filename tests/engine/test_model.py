from __future__ import annotations

import json
from pathlib import Path

import pytest

from evap.engine import model, model_builtin, model_hub
from evap.engine.model import DEFAULT_MODEL, LocalModel, check_directory, resolve
from evap.errors import StartupError


def write(path: Path, *names: str) -> Path:
    path.mkdir(exist_ok=True)
    for name in names:
        (path / name).write_text("{}")
    return path


WHOLE = ("config.json", "tokenizer.json", "model.safetensors")


def test_a_directory(tmp_path: Path) -> None:
    path = write(tmp_path / "my-model", *WHOLE)
    assert resolve(str(path)) == LocalModel(path.resolve(), "my-model", "directory")


def test_relative_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m", *WHOLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("m", "./m", "~/m", "m/"):
        assert resolve(name).path == path.resolve()
    monkeypatch.chdir(path)
    assert resolve(".").name == "m"


@pytest.mark.parametrize("left_out", WHOLE)
def test_what_is_missing_is_named(tmp_path: Path, left_out: str) -> None:
    path = write(tmp_path / "m", *[n for n in WHOLE if n != left_out])
    with pytest.raises(StartupError, match=f"lacks {left_out}") as caught:
        resolve(str(path))
    assert "save_pretrained" in caught.value.remedy


def test_shards(tmp_path: Path) -> None:
    path = write(tmp_path / "m", "config.json", "tokenizer.json", "model-1.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"w{i}": f"model-{i}.safetensors" for i in range(1, 8)}}))
    with pytest.raises(StartupError, match=r"model-2.safetensors.*and 2 more"):
        check_directory(path)
    write(path, *[f"model-{i}.safetensors" for i in range(2, 8)])
    check_directory(path)
    for bad in ("{", "[]", '{"weight_map": 1}'):
        index.write_text(bad)
        with pytest.raises(StartupError, match="not a safetensors index"):
            check_directory(path)


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    path = write(tmp_path / "m", "config.json", "tokenizer.json", "pytorch_model.bin")
    with pytest.raises(StartupError) as caught:
        check_directory(path)
    assert "pickled" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./absent", "does not exist"),
        ("/absent/model", "does not exist"),
        ("~/absent", "does not exist"),
        ("a/b/c", "does not exist"),
        ("x.gguf", "does not exist"),
        ("gpt-5", "no model named gpt-5"),
        ("a b", "no model named"),
        ("org/name extra", "no model named"),
    ],
)
def test_names_that_are_nothing(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError, match=words) as caught:
        resolve(name)
    assert DEFAULT_MODEL in caught.value.remedy


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("")
    with pytest.raises(StartupError, match="is a file"):
        resolve(str(tmp_path / "x.gguf"))


def test_who_is_asked_for_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def note(source: str, name: str) -> LocalModel:
        asked.append((source, name))
        return LocalModel(tmp_path, name, source)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_builtin, "fetch", lambda name, progress: note("builtin", name))
    monkeypatch.setattr(model_hub, "fetch", lambda name, progress: note("hub", name))
    for name in ("", "smollm2-135m", "Qwen/Qwen3-0.6B", "org/name@v1.0", "org/name@refs/pr/1"):
        resolve(name)
    assert asked == [
        ("builtin", DEFAULT_MODEL),
        ("builtin", DEFAULT_MODEL),
        ("hub", "Qwen/Qwen3-0.6B"),
        ("hub", "org/name@v1.0"),
        ("hub", "org/name@refs/pr/1"),
    ]
    write(tmp_path / "smollm2-135m", *WHOLE)
    assert resolve("smollm2-135m").source == "directory"  # a directory of that name is meant when it is there
    assert model.DEFAULT_MODEL in model_builtin.BUILTIN
