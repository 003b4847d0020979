"""What the head of a request says of how it is to be served: how long it is of use, how urgent it is."""

from __future__ import annotations

from typing import Final

from evap.errors import InvalidRequest
from evap.messages import ParsedRequest
from evap.metering.accounts import Account
from evap.protocol.events import RequestHead
from evap.protocol.priority import DEFAULT_URGENCY, URGENCIES, parse

MAX_DEADLINE_MS: Final = 7 * 86_400_000
#: A body's `priority` beyond this is as good as this.
LATEST: Final = 60


def deadline_ms(head: RequestHead) -> int:
    """Evap-Deadline-Ms: milliseconds in which the answer is of use; 0: no such header. Raises InvalidRequest."""
    value = head.get(b"evap-deadline-ms")
    if value is None:
        return 0
    if not value.isdigit() or len(value) > 10 or not 0 < int(value) <= MAX_DEADLINE_MS:
        raise InvalidRequest(
            f"Evap-Deadline-Ms is a whole number of milliseconds, 1 to {MAX_DEADLINE_MS}", param="evap-deadline-ms"
        )
    return int(value)


def priority(
    account: Account | None, head: RequestHead, request: ParsedRequest, update: bytes | None = None
) -> int:  # fmt: skip
    """The order of a request, lower is sooner: the class of its key (URGENCIES ranks each, 0 is an ordinary key's), and
    within it what the request says: its body's `priority` (vLLM's; 0 is ordinary), else RFC 9218's urgency.

    update: a PRIORITY_UPDATE, which replaces the header. Nothing that a request says gets it further than the key's
    `most_urgent`; it may put itself behind others as far as it likes.
    """
    own = request.priority
    if own is None:
        header = update if update is not None else head.get(b"priority")
        if header is None and account is None:
            return 0
        own = parse(header).urgency - DEFAULT_URGENCY if header is not None else 0
    own_class, most_urgent = (account.key.priority, account.key.most_urgent) if account is not None else (0, 0)
    return own_class * URGENCIES + min(LATEST, max(most_urgent - DEFAULT_URGENCY, own))
