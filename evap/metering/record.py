"""One settled exchange as a row: what it used, for whom, and why it ended. Integers, tokens and microseconds.

computed >= emitted >= delivered, always. What is charged for: the prompt if the engine gave any token, and `billable`
tokens of the answer, by a policy. "delivered": what the transport accepted. "emitted": what the engine gave, up to the
stop; where the server was at fault (FAULTS) it is still only what was delivered.
"""

from __future__ import annotations

from typing import Final

import msgspec

from evap.messages import Usage

#: Ends that are the server's fault. An operation that ended so, and delivered nothing, may be tried again.
FAULTS: Final = frozenset((
    "engine_failed", "engine_unavailable", "internal_error", "draining", "interrupted", "ttft_timeout",
))  # fmt: skip
#: Ends as the transport calls them -> as records call them.
_ENDS: Final = {"client_reset": "client_abort", "client_gone": "client_abort"}
INTERRUPTED: Final = "interrupted"  #: the server was killed; settled at the next start


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row of the ledger. Times are us since 1970, 0 for never. operation: the Idempotency-Key it has used up."""

    id: str
    key: str
    operation: str
    model: str
    opened_us: int
    first_us: int
    last_us: int
    settled_us: int
    prompt: int
    cached: int
    computed: int
    emitted: int
    delivered: int
    billable: int
    steps: int
    choices: int
    status: int
    end: str


COLUMNS: Final = Record.__struct_fields__
encode: Final = msgspec.json.Encoder().encode
decode: Final = msgspec.json.Decoder(Record).decode


def end_of(end: str) -> str:
    """Why it ended, as records say it."""
    return _ENDS.get(end, end)


def billable(policy: str, usage: Usage, end: str) -> int:
    """Tokens of the answer that are charged for; never more than emitted."""
    return usage.emitted if policy == "emitted" and end not in FAULTS else usage.delivered


def charged(usage: Usage, billable_tokens: int) -> int:
    """Tokens that count towards limits and budgets: the prompt counts if the engine gave any token."""
    return (usage.prompt if usage.computed else 0) + billable_tokens


def used_up(operation: str, *, end: str, delivered: int, submitted: bool) -> str:
    """The operation, if it may not be tried again; else ""."""
    return operation if submitted and (delivered or end not in FAULTS) else ""
