"""Copies the ledger to PostgreSQL in the background, in order, each record once, whatever the database does.

A thread with a loop of its own: a database that is down, frozen or slow delays nothing but the copy. What has been
copied is not noted here: the table knows (`max(seq)` of this ledger's node), and a record that comes twice is skipped
by its id. So it resumes after an outage of either side, and a table that was emptied is filled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import threading
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from evap.errors import StartupError
from evap.metering import ledger
from evap.metering.record import COLUMNS

logger = logging.getLogger("evap.sink")
BATCH: Final = 500
POLL_S: Final = 0.5
MAX_BACKOFF_S: Final = 30.0

_TEXT: Final = frozenset(("id", "key", "operation", "model", "end"))
_NAMES: Final = ", ".join(f'"{c}"' for c in COLUMNS)
_TYPED: Final = ", ".join(f'"{c}" {"text" if c in _TEXT else "bigint"}' for c in COLUMNS)
CREATE: Final = (
    f"CREATE TABLE IF NOT EXISTS evap_usage (node text NOT NULL, seq bigint NOT NULL, {_TYPED},"
    " PRIMARY KEY (id)); CREATE INDEX IF NOT EXISTS evap_usage_seq ON evap_usage (node, seq)"
)
INSERT: Final = (
    f"INSERT INTO evap_usage (node, seq, {_NAMES}) SELECT $1, seq, {_NAMES} FROM json_to_recordset($2::json)"  # noqa: S608
    f" AS row(seq bigint, {_TYPED}) ON CONFLICT (id) DO NOTHING"
)
_POSITION: Final = "SELECT COALESCE(MAX(seq), 0) FROM evap_usage WHERE node = $1"


class Sink:
    """url: postgresql://... Raises StartupError when asyncpg is not installed or the URL is none."""

    def __init__(self, url: str, folder: Path, *, timeout_s: float = 10.0) -> None:
        try:
            self._asyncpg: Any = importlib.import_module("asyncpg")
        except ImportError:
            raise StartupError("--usage-sink needs asyncpg", remedy="pip install 'evap[postgres]'") from None
        if urlsplit(url).scheme not in ("postgresql", "postgres"):
            raise StartupError("--usage-sink is not a postgresql:// URL", remedy="postgresql://user@host/database")
        self._url, self._folder, self._timeout_s = url, folder, timeout_s
        self._stop = threading.Event()
        self.copied = 0  #: records that the database has confirmed
        self.position = 0  #: the ledger's seq up to which all is there
        self.error = ""  #: why it is behind; empty while it works
        self._thread = threading.Thread(target=self._run, name="evap-sink", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """It copies what it can in that time; the rest follows after the next start."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.run(self._copy_for_ever())

    async def _copy_for_ever(self) -> None:
        wait_s = POLL_S
        while True:
            try:
                await self._copy()
                wait_s = POLL_S
            except Exception as error:  # noqa: BLE001 - whatever it is, the copy is behind, and is tried again
                if not self.error:
                    logger.warning("the usage sink does not answer: %s", _reason(error))
                self.error = _reason(error)
                wait_s = min(MAX_BACKOFF_S, wait_s * 2)
            if self._stop.is_set():
                return
            await self._sleep(wait_s)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.to_thread(self._stop.wait, seconds)

    async def _copy(self) -> None:
        """Connect, find out what is there, and copy until told to stop. Raises whatever goes wrong."""
        async with asyncio.timeout(self._timeout_s):
            db = await self._asyncpg.connect(self._url, timeout=self._timeout_s, command_timeout=self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                await db.execute(CREATE)
            with ledger.reading(self._folder) as source:
                node = ledger.node(source)
                async with asyncio.timeout(self._timeout_s):
                    self.position = await db.fetchval(_POSITION, node)
                if self.error:
                    logger.info("the usage sink answers again")
                self.error = ""
                while True:
                    more = await self._batch(db, source, node)
                    if not more:
                        if self._stop.is_set():
                            return
                        await self._sleep(POLL_S)
        finally:
            with contextlib.suppress(Exception):
                db.terminate()

    async def _batch(self, db: Any, source: Any, node: str) -> bool:
        found = ledger.rows(source, ledger.Filter(), after=self.position, limit=BATCH)
        if not found:
            return False
        rows = [{"seq": seq} | {name: getattr(record, name) for name in COLUMNS} for seq, record in found]
        async with asyncio.timeout(self._timeout_s):
            await db.execute(INSERT, node, json.dumps(rows))
        self.position = found[-1][0]
        self.copied += len(found)
        return True


def _reason(error: Exception) -> str:
    """One line without the URL, which may hold a password."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:200] if str(error) else type(error).__name__
