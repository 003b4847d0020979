"""How a draining HTTP/2 connection ends (RFC 9113 6.8): refuse, announce, close; never under a running stream.

1. New streams are refused with REFUSED_STREAM, which clients repeat elsewhere. No GOAWAY yet: httpx (so openai-python)
   and undici drop running streams when they see one.
2. When nothing has run for a moment, GOAWAY with the highest stream id: who obeys opens nothing more here. A PING goes
   with it (in front, in the same write), and what was on its way when the client read it is refused as before.
3. When the PING is back, or a round trip has had its time: GOAWAY with the last stream id, and the connection closes.

A client that leaves by itself (its GOAWAY) is told goodbye when its last stream is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from evap.protocol import headers as code
from evap.protocol.limits import NS

if TYPE_CHECKING:
    from evap.protocol.connection import Http2Core

#: From the last answer to the first GOAWAY: httpcore takes a GOAWAY that it reads together with the end of an answer
#: for a failure of every answer that another of its threads has not picked up yet.
GOODBYE_NS: Final = NS // 2
#: What a client that does not answer our PING is given.
ROUND_TRIP_NS: Final = NS // 2
PING: Final = b"evap-bye"


class Farewell:
    __slots__ = ("announced_ns", "answered_ns", "heard")

    def __init__(self) -> None:
        self.answered_ns = -GOODBYE_NS  #: when the last answer was done
        self.announced_ns = -1  #: when the first GOAWAY went out
        self.heard = False  #: the client has read it

    def step(self, core: Http2Core) -> None:
        """Nothing runs on `core`, and it is to end: do what is due, or arm its deadline."""
        if core.closing:
            return
        now_ns = core.now_ns
        if core.peer_leaving:
            core.goodbye(code.NO_ERROR, "")
        elif self.announced_ns < 0:
            due = self.answered_ns + GOODBYE_NS
            if now_ns >= due:
                core.outbox.pull()
                core.conn.announce_goaway(PING)
                self.announced_ns, due = now_ns, now_ns + ROUND_TRIP_NS
            core.arm(due)
        elif self.heard or now_ns >= self.announced_ns + ROUND_TRIP_NS:
            core.goodbye(code.NO_ERROR, "")
        else:
            core.arm(self.announced_ns + ROUND_TRIP_NS)
