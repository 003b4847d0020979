"""Which engine `--engine auto` takes, and whether the one asked for is installed. Imports none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Final

from evap.errors import StartupError

#: engine -> (the package it needs, the command that installs it)
NEEDS: Final = {
    "synthetic": ("", ""),
    "torch": ("torch", "pip install 'evap[torch]'"),
    "vllm": ("vllm", "pip install 'evap[vllm]'"),
}
#: What `auto` tries, best first: who has installed vLLM wants it.
AUTO: Final = ("vllm", "torch")


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def choose(engine: str, installed: Callable[[str], bool] = installed) -> str:
    """`engine`, or for "auto" the best one that is installed. Raises StartupError with the command that helps."""
    if engine == "auto":
        for name in AUTO:
            if installed(NEEDS[name][0]):
                return name
        raise StartupError(
            "no engine is installed",
            remedy=f"{NEEDS[AUTO[-1]][1]}, or --engine synthetic for load tests without a model",
        )
    package, command = NEEDS[engine]
    if package and not installed(package):
        raise StartupError(f"--engine {engine} needs the package {package}, which is not installed", remedy=command)
    return engine
