"""Names that no client can choose or compute: of responses, and of keys' prefix caches.

An id of one of several processes says which one made it, in its first character, so that another one, which is asked
about it, knows whom to ask.
"""

from __future__ import annotations

import base64
import hashlib
import os
import string
from typing import Final

#: Ids made at once, because a system call each costs more than all the rest.
BATCH: Final = 128
ID_BYTES: Final = 18
ID_CHARS: Final = 24
#: Longest id that is looked at, with what stands before those.
MAX_CHARS: Final = 64
#: base64url (RFC 4648 section 5): one of them is a process's number, of up to 64.
DIGITS: Final = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"


class Identity:
    """One per process. number: its own, of several."""

    def __init__(self, number: int | None = None) -> None:
        self._ids: list[str] = []
        self.secret = os.urandom(32)
        self.number = number

    def new_id(self) -> str:
        """24 characters, of which 23 at least are unguessable (138 bits)."""
        if not self._ids:
            text = base64.urlsafe_b64encode(os.urandom(ID_BYTES * BATCH)).decode()
            own = DIGITS[self.number] if self.number is not None else ""
            self._ids = [own + text[i + len(own) : i + ID_CHARS] for i in range(0, len(text), ID_CHARS)]
        return self._ids.pop()

    def cache_salt(self, key_id: str) -> str:
        """What separates the prefix caches of keys; "" without keys."""
        return hashlib.blake2b(key_id.encode(), key=self.secret, digest_size=12).hexdigest() if key_id else ""


def maker(id: str) -> int:
    """The number of the process that made an id, if one of several did; -1 for what is no id, as clients send it: of
    any length, which is nobody's to carry about."""
    return DIGITS.find(id[-ID_CHARS]) if ID_CHARS <= len(id) <= MAX_CHARS else -1
