"""What a client may make us do, and hold, before its connection ends: ENHANCE_YOUR_CALM, with the limit's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from evap.config import ProtocolConfig
from evap.protocol import headers as code
from evap.protocol.gate import Violation
from evap.protocol.limits import Shared

if TYPE_CHECKING:
    from evap.protocol.connection import Http2Core

#: Limit -> the bucket of `limits.Budgets` that it is, and what to say when that is empty.
BUCKETS: Final = {
    "resets": ("resets", "too many streams were reset"),
    "refused_streams": ("late", "too many streams were refused"),
    "late_frames": ("late", "too many frames on closed streams"),
    "control_frames": ("control", "too many frames without effect"),
    "window_updates": ("window", "too many WINDOW_UPDATE frames"),
}


def spend(core: Http2Core, limit: str, cost: float = 1.0) -> None:
    """Raises Violation when the client has used up what it may."""
    bucket, reason = BUCKETS[limit]
    if not getattr(core.budgets, bucket).take(core.now_ns, cost):
        raise Violation(code.ENHANCE_YOUR_CALM, reason, limit)


class Held:
    """Octets of frames and header blocks that are not complete: of one connection. They count with the heads of
    requests (`Shared.header_bytes`), for all connections together."""

    __slots__ = ("_config", "_shared", "_size")

    def __init__(self, shared: Shared, config: ProtocolConfig) -> None:
        self._shared, self._config = shared, config
        self._size = 0

    def note(self, size: int) -> None:
        """So many are held now. Raises Violation when that is more than before, and too much for the process."""
        before, self._size = self._size, size
        self._shared.header_bytes += size - before
        if size > before and self._shared.header_bytes > self._config.max_buffered_header_bytes:
            raise Violation(code.ENHANCE_YOUR_CALM, "too many header bytes at once", "header_bytes")
