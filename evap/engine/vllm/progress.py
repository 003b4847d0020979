"""Log lines of an engine -> what a person waiting for it, or mending it, wants to read. No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

#: pattern in vLLM's log -> line to show; groups are filled in. What does not match is not shown.
LINES: Final = (
    (r"Initializing a V1 LLM engine", "engine process is up"),
    (r"Starting to load model", "loading weights"),
    (r"Loading weights took ([\d.]+) seconds", "weights loaded in {0} s"),
    (r"Model loading took ([\d.]+) GiB", "weights take {0} GiB"),
    (r"KV cache size: ([\d,]+) tokens", "KV cache for {0} tokens"),
    (r"Warming up model", "warming up"),
    (r"(?:Start compiling|Compiling a graph|Cache the graph)", "compiling"),
    (r"Capturing (?:CUDA|cudagraph)", "capturing CUDA graphs"),
    (r"Graph capturing finished in (\d+) secs", "CUDA graphs captured in {0} s"),
    (r"init engine .* took ([\d.]+) s", "engine initialised in {0} s"),
)
#: A warning that is about evap itself.
OURS: Final = "Using custom scheduler class evap."
_COMPILED: Final = [(re.compile(pattern), line) for pattern, line in LINES]


def progress_of(message: str) -> str:
    """The line to show, or ""."""
    for pattern, line in _COMPILED:
        found = pattern.search(message)
        if found:
            return line.format(*found.groups())
    return ""


_EXCEPTION: Final = re.compile(r"\((\w+(?:Error|Exception|Exit)): (.+)\)$")
MAX_CAUSE: Final = 400


def root_cause(errors: Sequence[str]) -> str:
    """The first error that carries an exception (what follows it is its consequence), else the last; "" for none."""
    for message in errors:
        found = _EXCEPTION.search(message)
        if found:
            return f"{found[1]}: {found[2]}"[:MAX_CAUSE]
    return errors[-1][:MAX_CAUSE] if errors else ""
