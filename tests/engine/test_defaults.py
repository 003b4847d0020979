"""A model's own sampling defaults: where they come from, and what of them is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evap.engine.defaults import AUTO, NONE, max_tokens, read, sampling
from evap.errors import StartupError


def write(folder: Path, found: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(found))
    return folder


def test_the_models_file_another_or_none(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, k in ((own, 5), (other, 6)):
        folder.mkdir()
        write(folder, {"top_k": k})
    assert read(AUTO, own) == {"top_k": 5}
    assert read(str(other), own) == {"top_k": 6}
    assert read(NONE, own) == {}
    assert read(AUTO, tmp_path) == {}
    with pytest.raises(StartupError, match="no generation_config"):
        read(str(tmp_path), own)


@pytest.mark.parametrize("text", ["{", "\xff", "[1]", "3"])
def test_a_file_that_is_no_such_thing(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(text.encode("latin-1"))
    if text in ("[1]", "3"):
        assert read(AUTO, tmp_path) == {}
    else:
        with pytest.raises(StartupError, match="cannot be read"):
            read(AUTO, tmp_path)


def test_what_is_known_and_in_range_is_taken() -> None:
    found = {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05, "do_sample": True,
        "eos_token_id": [1, 2], "presence_penalty": None, "max_new_tokens": 2048,
    }  # fmt: skip
    assert sampling(found) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05}
    assert max_tokens(found) == 2048


@pytest.mark.parametrize(
    "found",
    [
        {"temperature": 2.5}, {"temperature": "hot"}, {"top_p": 0}, {"top_p": float("nan")}, {"repetition_penalty": 0},
        {"temperature": True}, {"top_k": 0}, {"top_k": -1}, {"top_k": 2.5}, {"top_k": True}, {"min_p": [0.1]}, {},
    ],
)  # fmt: skip
def test_what_the_api_would_refuse_is_left_out(found: dict[str, Any]) -> None:
    assert sampling(found) == {}


@pytest.mark.parametrize("found", [{}, {"max_new_tokens": 0}, {"max_new_tokens": None}, {"max_new_tokens": True}])
def test_no_limit_of_its_own(found: dict[str, Any]) -> None:
    assert max_tokens(found) == 0
