"""Records for tests."""

from __future__ import annotations

from typing import Any

from evap.metering.record import Record

DAY_US = 86_400_000_000


def record(id: str = "chatcmpl-1", **fields: Any) -> Record:
    """20 tokens for a prompt of 10, on day 20,000; any field may be given."""
    values: dict[str, Any] = {
        "id": id, "key": "alice", "operation": "", "model": "m", "opened_us": 20_000 * DAY_US, "first_us": 0,
        "last_us": 0, "settled_us": 20_000 * DAY_US + 5, "prompt": 10, "cached": 4, "computed": 20, "emitted": 20,
        "delivered": 20, "billable": 20, "steps": 20, "choices": 1, "status": 200, "end": "stop",
    }  # fmt: skip
    return Record(**values | fields)
