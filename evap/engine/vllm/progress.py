"""Log lines of a starting engine -> what a person waiting for it wants to read. No I/O."""

from __future__ import annotations

import re
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
_COMPILED: Final = [(re.compile(pattern), line) for pattern, line in LINES]


def progress_of(message: str) -> str:
    """The line to show, or ""."""
    for pattern, line in _COMPILED:
        found = pattern.search(message)
        if found:
            return line.format(*found.groups())
    return ""
