"""What a server's parent process and its loop processes say to each other, over a `pipe.py`.

Nothing of a token goes here: loop processes have channels of their own to the engine (`engine/channel.py`).
"""

from __future__ import annotations

import msgspec

from evap.config import Config
from evap.messages import EngineInfo


class Message(msgspec.Struct, array_like=True, tag=str.lower):
    pass


class Start(Message):
    """The first one. What the process is, and the descriptors that it has inherited.

    tcp: (host, port) to listen on with SO_REUSEPORT. listening: descriptors of sockets that all processes accept from.
    accounts: descriptor of `SharedAccounts` and its rows; operations, turns: of `SharedOperations` and `Turns`;
    tally: of its own `Tally`.
    secret: for cache salts. certificate: (certificate, key) in PEM, where the parent has made them.
    late: others serve already, so that connections are better taken once the engine can be reached.
    """

    number: int
    count: int
    config: Config
    tcp: tuple[str, int] | None
    listening: list[int]
    accounts: int
    rows: int
    operations: int
    turns: int
    secret: bytes
    certificate: tuple[bytes, bytes] | None = None
    tally: int = -1
    late: bool = False


class Engine(Message):
    """How the engine is, and a line about it. That it is ready is said by `Way`."""

    state: str
    line: str


class Way(Message):
    """A way to the engine, which is ready; descriptors may come with it (see `engine/interface.py`)."""

    how: dict[str, str | int]
    info: EngineInfo


class Behind(Message):
    """Why the usage sink, which the parent feeds, is behind; empty: it is not."""

    reason: str


class Signal(Message):
    """SIGTERM or SIGHUP, which loop processes take from their parent only: service managers send theirs to all."""

    number: int


class Question(Message):
    """Asked of a loop process; or by one, of all others (of: -1) or of one. id: the asker's."""

    id: int
    kind: str  # "metrics" | "usage" | "flush" | "block"
    about: str = ""
    of: int = -1


class Answer(Message):
    id: int
    data: bytes


class Up(Message):
    """It accepts connections, and the engine is ready."""

    model: str
    chat: bool
    info: EngineInfo


class Want(Message):
    """A way to the engine, please. meter: our counters page for it."""

    meter: dict[str, str] | None


ToChild = Start | Engine | Way | Behind | Signal | Question | Answer
FromChild = Up | Want | Question | Answer
