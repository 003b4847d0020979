"""Budgets and deadlines of the wire, as plain numbers and clocks passed inward.

What a peer may make us do for free is a token bucket; what it may make us wait for is a deadline. Both are per
connection; what all connections share (counts, buffered bytes, the date) is one `Shared` object per process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Final

from evap.config import ProtocolConfig
from evap.errors import EvapError
from evap.protocol.events import RequestHead
from evap.protocol.headers import DateCache, wire_code

#: Our own DATA frames are never longer, whatever the peer allows: a large body must not hold up other streams.
MAX_DATA_FRAME: Final = 16_384
#: Longest frame we accept: the initial SETTINGS_MAX_FRAME_SIZE (RFC 9113 6.5.2), never raised.
MAX_FRAME: Final = 16_384
NS: Final = 1_000_000_000
NEVER: Final = 1 << 62
#: The names of all limits of the wire, as they are counted: a closed list.
LIMITS: Final = (
    "connections", "connections_per_address", "streams", "open_streams", "header_list", "header_bytes", "body_size",
    "body_bytes", "resets", "control_frames", "window_updates", "late_frames", "refused_streams", "header_block",
    "hpack_table", "settings", "frames_at_once", "tiny_chunks", "unwanted_body", "preface_timeout", "settings_timeout",
    "header_timeout", "body_timeout", "stall_timeout", "idle_timeout",
)  # fmt: skip

#: Codes of errors that are a limit's.
TOO_MANY_BODIES: Final = "too_many_body_bytes"
TOO_MANY_HEADERS: Final = "too_many_header_bytes"
TOO_MANY_CHUNKS: Final = "too_many_tiny_chunks"
#: Connections closed for a protocol violation, promises made, and those that the client reset.
COUNTS: Final = ("violations", "pushed", "push_refused")
ERROR_LIMITS: Final = {
    "headers_too_large": "header_list", "body_too_large": "body_size", "request_timeout": "body_timeout",
    TOO_MANY_BODIES: "body_bytes", TOO_MANY_HEADERS: "header_bytes",
    TOO_MANY_CHUNKS: "tiny_chunks",
}  # fmt: skip


def to_ns(seconds: float) -> int:
    return int(seconds * NS)


def tick_period_s(config: ProtocolConfig) -> float:
    """The period of the process' timer: half of the shortest deadline, within reason."""
    shortest = min(
        config.stall_timeout_s, config.preface_timeout_s, config.settings_timeout_s, config.header_timeout_s,
        config.body_timeout_s, config.idle_timeout_s,
    )  # fmt: skip
    return min(1.0, max(0.02, shortest / 2))


def network_of(peer: str) -> str:
    """Whom a peer's address stands for: an IPv4 host, an IPv6 /64 (what one subscriber has), "" where it is unknown.

    peer: as `sockets.address` writes it: host:port, [host]:port, or "" (a UNIX socket).
    """
    if not peer.startswith("["):
        return peer.rpartition(":")[0]
    host = peer[1:].partition("]")[0].partition("%")[0]
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Address(int(address) >> 64 << 64))


class TokenBucket:
    """`burst` at once, `per_s` per second after that. Time is an argument and may stand still, not run back."""

    __slots__ = ("_at_ns", "_burst", "_per_ns", "level")

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst = float(burst)
        self._per_ns = per_s / NS
        self._at_ns: int | None = None
        self.level = float(burst)

    def take(self, now_ns: int, n: float = 1.0) -> bool:
        """False when n tokens are not there; they are taken all the same, so that a flood stays refused."""
        at = self._at_ns
        if at is not None and now_ns > at:
            self.level = min(self._burst, self.level + (now_ns - at) * self._per_ns)
        self._at_ns = now_ns if at is None else max(at, now_ns)
        self.level -= n
        return self.level >= 0.0

    def give(self, n: float) -> None:
        self.level = min(self._burst, self.level + n)


class Budgets:
    """The buckets of one HTTP/2 connection.

    resets: RST_STREAM from the client, and resets it provoked (CVE-2023-44487 Rapid Reset, CVE-2025-8671 MadeYouReset).
    control: frames that cost us work and do nothing: PING, SETTINGS, PRIORITY, unknown types, tiny DATA.
    window: WINDOW_UPDATE frames; every DATA frame of ours that is not tiny gives `credit` back.
    late: frames for streams that are closed already: those in flight when we reset a stream are innocent.
    """

    __slots__ = ("control", "credit", "late", "resets", "tiny", "window")

    def __init__(self, config: ProtocolConfig) -> None:
        self.resets = TokenBucket(config.reset_burst, config.reset_per_s)
        self.control = TokenBucket(config.control_burst, config.control_per_s)
        self.window = TokenBucket(config.control_burst, config.control_per_s)
        self.late = TokenBucket(config.late_burst, config.control_per_s)
        self.credit, self.tiny = config.window_update_credit, config.tiny_data_bytes


class WriteProgress:
    """What the transport holds, and when it last passed something on (the write deadline counts from there)."""

    __slots__ = ("_given", "_passed", "queued", "since_ns")

    def __init__(self, now_ns: int) -> None:
        self._given = 0
        self._passed = 0
        self.queued = 0
        self.since_ns = now_ns

    def given(self, size: int) -> None:
        self._given += size

    def note(self, queued: int, now_ns: int) -> None:
        passed = self._given - queued
        if passed > self._passed or not queued or not self.queued:
            self.since_ns = now_ns
        self._passed = passed
        self.queued = queued


@dataclass(slots=True)
class Shared:
    """What the connections of a process share. Used from the loop's thread only."""

    #: Open connections, and request bytes received but not yet handed over.
    connections: int = 0
    body_bytes: int = 0
    #: Bodies of more bytes come as a Spool; set by who takes them from there.
    spool_over: int = NEVER
    #: Asked with the head of a request over HTTP/2 whose body has yet to come; an error answers it at once.
    admit: Callable[[RequestHead], EvapError | None] | None = None
    #: Told the status of each request that the wire itself refuses.
    answered: Callable[[int], None] = lambda status: None
    draining: bool = False
    #: Wall clock minus the clock of `now_ns`; the shell refreshes it, so that `date` follows the wall clock.
    wall_offset_ns: int = 0
    dates: DateCache = field(default_factory=DateCache)
    #: Requests taken, and streams refused.
    requests: int = 0
    refused: int = 0
    #: For /metrics, see COUNTS.
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    #: Open HTTP/2 streams, and octets of request heads: of open streams, and of those that are not complete.
    streams: int = 0
    header_bytes: int = 0
    #: Network (see `network_of`) -> its open connections; only where there is a limit.
    networks: dict[str, int] = field(default_factory=dict)
    #: limit of LIMITS -> how often it has refused, ended or closed something.
    limits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0))

    def hit(self, limit: str) -> None:
        self.limits[limit] += 1

    def violation(self, limit: str) -> None:
        """A connection ends because its peer broke the protocol, or overran a limit."""
        self.counts["violations"] += 1
        if limit:
            self.hit(limit)

    def note(self, error: EvapError) -> None:
        """A request is refused by the wire itself."""
        self.answered(wire_code(error)[0])
        limit = ERROR_LIMITS.get(error.code or "")
        if limit is not None:
            self.hit(limit)

    def arrived(self, peer: str, config: ProtocolConfig) -> bool:
        """A connection is there. False: it is one too many, and to be turned away (`left` is called all the same)."""
        self.connections += 1
        limit = ""
        if self.connections > config.max_connections:
            limit = "connections"
        if config.max_connections_per_address and (network := network_of(peer)):
            count = self.networks[network] = self.networks.get(network, 0) + 1
            if count > config.max_connections_per_address:
                limit = "connections_per_address"
        if limit:
            self.hit(limit)
        return not limit

    def left(self, peer: str) -> None:
        self.connections -= 1
        network = network_of(peer)
        count = self.networks.get(network, 0) - 1
        if count > 0:
            self.networks[network] = count
        else:
            self.networks.pop(network, None)

    def no_stream(self, own: int, config: ProtocolConfig) -> bool:
        """A stream that was just opened, the `own`th of its connection, is one too many."""
        if own > config.max_concurrent_streams:
            self.hit("streams")
        elif self.streams > config.max_open_streams:
            self.hit("open_streams")
        else:
            return False
        return True

    def closed(self, head_bytes: int) -> None:
        """A stream is over."""
        self.streams -= 1
        self.header_bytes -= head_bytes

    def date(self, now_ns: int) -> bytes:
        return self.dates.at((now_ns + self.wall_offset_ns) // NS)
