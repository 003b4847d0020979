"""Request ids that name their slot, so that code in the engine's processes, and a look at a message's bytes, find it.

24 ASCII characters: "ev", then in hexadecimal a nonce of the process (6), a number (8), the slot (4), generation (4).
All have one length, so that in vLLM's messages the slot stands at a fixed place. AsyncLLM appends something of its own.
"""

from __future__ import annotations

import re
from typing import Final

MARK: Final = "ev"
LENGTH: Final = 24
#: where slot and generation begin
SLOT_AT: Final = 16
_OURS: Final = re.compile(MARK + "([0-9a-f]{6})[0-9a-f]{8}([0-9a-f]{4})([0-9a-f]{4})(?:-|$)")


def make(nonce: str, number: int, slot: int, generation: int) -> str:
    """nonce: 6 hexadecimal digits."""
    return f"{MARK}{nonce}{number & 0xFFFFFFFF:08x}{slot:04x}{generation:04x}"


def parse(request_id: str) -> tuple[int, int] | None:
    """(slot, generation); None for an id that is not ours (a warm-up, say)."""
    found = _OURS.match(request_id)
    return (int(found[2], 16), int(found[3], 16)) if found else None


def nonce_of(request_id: str) -> str:
    """The nonce of the process that asked for it; "" for an id that is not ours."""
    found = _OURS.match(request_id)
    return found[1] if found else ""
