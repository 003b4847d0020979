"""What a killed process left, as records: exchanges that it had open, and those that it had settled and not committed.

The note of an exchange says whose it is; it is written when the exchange is opened, and read only here.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec

from evap.messages import Usage
from evap.metering import opened
from evap.metering.counters import PREFIX, Left
from evap.metering.record import INTERRUPTED, Record, billable, used_up

logger = logging.getLogger("evap.metering")
#: (id, key, operation, model, us since 1970 when it was opened, prompt tokens, choices) -> bytes
note: Final = msgspec.msgpack.Encoder().encode
_read: Final = msgspec.msgpack.Decoder(tuple[str, str, str, str, int, int, int]).decode


def records(folder: Path, table: Path, *, policy: str, now_us: int, pages: str = PREFIX) -> list[Record]:
    """All of them, from the table of open exchanges and the engines' counters pages (prefix of their names)."""
    left = Left(folder, pages)
    try:
        found = opened.recover(table, left.row)
    finally:
        left.close()
    if killed := sum(s.final is None for s in found):
        logger.warning("%d exchanges were open when their process was killed: settled now", killed)
    return [record for s in found if (record := _record(s, policy, now_us)) is not None]


def _record(survivor: opened.Survivor, policy: str, now_us: int) -> Record | None:
    """As it was settled, or as it was interrupted."""
    try:
        id, key, operation, model, opened_us, prompt, choices = _read(survivor.note)
    except msgspec.DecodeError:  # killed within the microsecond in which its note was written: it had no token yet
        logger.warning("an exchange that was open cannot be read")
        return None
    if (final := survivor.final) is not None:
        return msgspec.structs.replace(
            final, id=id, key=key, operation=operation if final.operation else "", model=model, opened_us=opened_us,
            prompt=prompt, choices=choices,
        )  # fmt: skip
    usage = Usage(
        prompt=prompt, cached=survivor.cached, computed=survivor.computed, emitted=survivor.emitted,
        delivered=survivor.delivered,
    )  # fmt: skip
    kept = used_up(operation, end=INTERRUPTED, delivered=usage.delivered, submitted=True)
    return Record(
        id, key, kept, model, opened_us, survivor.first_us, survivor.last_us, now_us, prompt, usage.cached,
        usage.computed, usage.emitted, usage.delivered, billable(policy, usage, INTERRUPTED), survivor.steps, choices,
        0, INTERRUPTED,
    )  # fmt: skip
