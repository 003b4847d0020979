"""A model's own sampling defaults (generation_config.json), for what a request leaves open, as in vLLM's server.

Only numbers in the ranges that the API allows are taken; a model that asks for more is served with the API's defaults.
End-of-sequence ids are in the same file, and are the tokenizer's part.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from evap.errors import StartupError, echo

logger = logging.getLogger(__name__)

#: `--generation-config`: the model's own file, and none (the word is vLLM's)
AUTO: Final = "auto"
NONE: Final = "vllm"
#: name -> least (not itself where it must be more), greatest
_RANGES: Final = {
    "temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0), "repetition_penalty": (0.0, 10.0),
}  # fmt: skip
_POSITIVE: Final = ("top_p", "repetition_penalty")


def read(source: str, model: Path) -> dict[str, Any]:
    """What `--generation-config` names, as it stands there. Raises StartupError for a directory without the file."""
    if source == NONE:
        return {}
    file = (model if source == AUTO else Path(source)) / "generation_config.json"
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        if source == AUTO:
            return {}
        raise StartupError(
            f"--generation-config {echo(source)}: there is no generation_config.json",
            remedy="auto, vllm or a directory",
        ) from None
    except (OSError, ValueError) as e:
        raise StartupError(f"{file} cannot be read: {e}", remedy=f"--generation-config {NONE}") from e
    return found if isinstance(found, dict) else {}


def sampling(found: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams."""
    taken: dict[str, Any] = {}
    for name, (low, high) in _RANGES.items():
        value = found.get(name)
        if value is None:
            continue
        if _number(value) and low <= value <= high and (value > low or name not in _POSITIVE):
            taken[name] = float(value)
        else:
            logger.warning("generation_config.json: %s %s is out of range, and not used", name, echo(value))
    top_k = found.get("top_k")
    if isinstance(top_k, int) and not isinstance(top_k, bool) and top_k > 0:
        taken["top_k"] = top_k
    return taken


def max_tokens(found: Mapping[str, Any]) -> int:
    """Transformers' max_new_tokens (vLLM calls it max_tokens); 0 when there is none."""
    for name in ("max_tokens", "max_new_tokens"):
        value = found.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
