"""Names that no client can choose or compute: of responses, and of keys' prefix caches."""

from __future__ import annotations

import base64
import hashlib
import os
from typing import Final

#: Ids made at once, because a system call each costs more than all the rest.
BATCH: Final = 128
ID_BYTES: Final = 18  # 24 characters


class Identity:
    """One per process."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self.secret = os.urandom(32)

    def new_id(self) -> str:
        """24 unguessable characters."""
        if not self._ids:
            text = base64.urlsafe_b64encode(os.urandom(ID_BYTES * BATCH)).decode()
            self._ids = [text[i : i + 24] for i in range(0, len(text), 24)]
        return self._ids.pop()

    def cache_salt(self, key_id: str) -> str:
        """What separates the prefix caches of keys; "" without keys."""
        return hashlib.blake2b(key_id.encode(), key=self.secret, digest_size=12).hexdigest() if key_id else ""
