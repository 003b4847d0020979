"""What a connection waits for, and for how long: called from `Http2Core.tick`, which has the time in `now_ns`.

Each check either acts or arms the core's next deadline, so an idle connection costs nothing between deadlines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from evap.errors import RequestTimeout
from evap.protocol import headers as code
from evap.protocol.limits import to_ns
from evap.protocol.stream import State, Stream

if TYPE_CHECKING:
    from evap.protocol.connection import Http2Core


#: Limit -> GOAWAY's code and reason.
EXPIRED: Final = {
    "preface_timeout": (code.SETTINGS_TIMEOUT, "no SETTINGS in time"),
    "settings_timeout": (code.SETTINGS_TIMEOUT, "SETTINGS not acknowledged"),
    "header_timeout": (code.PROTOCOL_ERROR, "frame not completed in time"),
    "stall_timeout": (code.NO_ERROR, "nothing was read in time"),
    "idle_timeout": (code.NO_ERROR, "idle"),
}


def check_connection(core: Http2Core) -> None:
    config = core.config
    if not core.inbound.greeted:
        _expire(core, core.started_ns, config.preface_timeout_s, "preface_timeout")
    elif not core.settings_acked:
        _expire(core, core.started_ns, config.settings_timeout_s, "settings_timeout")
    if core.inbound.partial_ns is not None:
        _expire(core, core.inbound.partial_ns, config.header_timeout_s, "header_timeout")
    if core.writes.queued:
        _expire(core, core.writes.since_ns, config.stall_timeout_s, "stall_timeout")
    if not core.streams:
        _expire(core, core.active_ns, config.idle_timeout_s, "idle_timeout")


def _expire(core: Http2Core, since_ns: int, seconds: float, limit: str) -> None:
    due = since_ns + to_ns(seconds)
    if core.now_ns < due:
        core.arm(due)
    elif not core.closing:
        core.shared.hit(limit)
        stalled = core.writes.queued > 0
        core.goodbye(*EXPIRED[limit])
        core.cancel_all("stalled" if stalled else "protocol_error")
        core.aborting = stalled


def check_stream(core: Http2Core, stream: Stream) -> None:
    now_ns = core.now_ns
    if stream.state is State.RECEIVING:
        due = stream.seen_ns + to_ns(core.config.body_timeout_s)
        if now_ns >= due:
            core.answer(stream, RequestTimeout("the body did not arrive in time"))
        else:
            core.arm(due)
    elif stream.state is State.LINGERING:
        due = stream.seen_ns + to_ns(core.config.linger_s)
        if now_ns >= due:
            core.break_stream(stream, code.NO_ERROR, "")  # RFC 9113 8.1: the rest is not wanted
        else:
            core.arm(due)
    if stream.stalled_ns is None:
        return
    if stream.progress >= core.config.min_progress_bytes:
        stream.stalled_ns, stream.progress = now_ns, 0
    due = stream.stalled_ns + to_ns(core.config.stall_timeout_s)
    if now_ns >= due:
        core.shared.hit("stall_timeout")
        core.break_stream(stream, code.CANCEL, "stalled")
    else:
        core.arm(due)
