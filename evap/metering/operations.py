"""Idempotency keys: an operation is generated once, whatever a client sends twice.

An operation is a key of the client's choice, within its own API key. While its exchange runs, or has used it up, a
replay is refused, and told where the record is. The last ones are kept here; older ones are asked of the ledger.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from evap.errors import Conflict, InvalidRequest

MAX_BYTES: Final = 128
REMEMBERED: Final = 65_536


def read(header: bytes) -> str:
    """The operation named by an Idempotency-Key. Raises InvalidRequest."""
    if not 0 < len(header) <= MAX_BYTES or not all(0x21 <= byte <= 0x7E for byte in header):
        raise InvalidRequest(
            f"Idempotency-Key must be 1 to {MAX_BYTES} printable ASCII characters", param="idempotency-key"
        )
    return header.decode("ascii")


class Operations:
    """Those that run and those that are over, by (key id, operation)."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._running: dict[tuple[str, str], str] = {}
        self._used: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._most = remembered
        self.forgot = False  #: some that were used up are not remembered

    def begin(self, key: str, operation: str, id: str) -> None:
        """Raises Conflict for one that is running or used up."""
        running = self._running.get((key, operation))
        if running is not None:
            raise conflict(running, running=True)
        used = self._used.get((key, operation))
        if used is not None:
            raise conflict(used, running=False)
        self._running[key, operation] = id

    def end(self, key: str, operation: str, id: str, *, used_up: bool) -> None:
        self._running.pop((key, operation), None)
        if used_up:
            self.remember(key, operation, id)

    def remember(self, key: str, operation: str, id: str) -> None:
        self._used[key, operation] = id
        self._used.move_to_end((key, operation))
        if len(self._used) > self._most:
            self._used.popitem(last=False)
            self.forgot = True


def conflict(id: str, *, running: bool) -> Conflict:
    """Names the exchange, which the same key may look up."""
    state = "is running" if running else "is complete and is not generated again"
    return Conflict(
        f"this Idempotency-Key {state}: its record is at /v1/usage/{id}",
        param="idempotency-key", code="operation_running" if running else "operation_complete",
    )  # fmt: skip
