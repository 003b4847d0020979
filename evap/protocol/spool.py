"""A large request body in a memory file. It grows as pieces arrive, and goes to another process as a descriptor: the
loop neither joins nor copies it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evap.protocol.limits import Shared


class Spool:
    """Counted in `shared.body_bytes` until `free` or `close`. `size`: bytes written.

    Raises OSError when the system has no descriptor or no memory for it.
    """

    __slots__ = ("_counted", "_shared", "fd", "size")

    def __init__(self, shared: Shared, pieces: Iterable[bytes]) -> None:
        """`pieces` have been counted already, and still are if this raises."""
        self._shared = shared
        self.size = self._counted = 0
        self.fd = -1
        self.fd = os.memfd_create("evap-body")
        for piece in pieces:
            self._write(piece)
        self._counted = self.size

    def write(self, piece: bytes) -> None:
        self._write(piece)
        self._counted += len(piece)
        self._shared.body_bytes += len(piece)

    def _write(self, piece: bytes) -> None:
        left = memoryview(piece)
        while left:
            left = left[os.write(self.fd, left) :]
        self.size += len(piece)

    def free(self) -> None:
        """Its bytes are gone (the file was truncated) or nobody's concern any more."""
        self._shared.body_bytes -= self._counted
        self._counted = 0

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.free()

    __del__ = close  # whoever has lost a request has lost its body


#: What a request's body is: large ones come as a Spool where somebody asked for them (`Shared.spool_over`).
Body = bytes | Spool
