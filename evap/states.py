"""The states of an exchange, and what moves it from one to the next: a table, and nothing else."""

from __future__ import annotations

import enum
from typing import Final


class State(enum.Enum):
    __hash__ = object.__hash__  # members are singletons; Enum's own hash is Python code, called at each transition

    OPEN = "open"  #: parsed; its prompt is being tokenized
    RUNNING = "running"  #: submitted; tokens may come
    ANSWERED = "answered"  #: the reply was ended; slots or bytes are outstanding
    CANCELLED = "cancelled"  #: the client went away (or was sent an error); slots are outstanding
    SETTLED = "settled"


class Input(enum.Enum):
    __hash__ = object.__hash__

    SUBMIT = "submit"
    ANSWER = "answer"
    CANCEL = "cancel"
    SETTLE = "settle"


TRANSITIONS: Final[dict[tuple[State, Input], State]] = {
    (State.OPEN, Input.SUBMIT): State.RUNNING,
    (State.OPEN, Input.ANSWER): State.ANSWERED,  # refused: an error before any token
    (State.OPEN, Input.CANCEL): State.CANCELLED,
    (State.RUNNING, Input.ANSWER): State.ANSWERED,
    (State.RUNNING, Input.CANCEL): State.CANCELLED,
    (State.ANSWERED, Input.CANCEL): State.CANCELLED,  # gone before it had read everything
    (State.ANSWERED, Input.SETTLE): State.SETTLED,
    (State.CANCELLED, Input.SETTLE): State.SETTLED,
}
