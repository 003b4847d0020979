"""Where an engine core and the processes that use it meet: UNIX sockets in the host's directory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Address(NamedTuple):
    """number: of the process among the engine's clients. input: where it binds for requests; output: for outputs."""

    number: int
    input: str
    output: str


def addresses(folder: Path, count: int) -> list[Address]:
    return [Address(n, f"ipc://{folder}/in-{n}", f"ipc://{folder}/out-{n}") for n in range(count)]
