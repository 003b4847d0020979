"""The copy to PostgreSQL: each record once, through restarts and freezes of a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from evap.errors import StartupError
from evap.metering import ledger, sink
from evap.metering.sink import Sink
from tests.clients.asking import eventually
from tests.metering.postgres import Postgres
from tests.metering.rows import record
from tests.support import TIME_FACTOR, running

WAIT_S = 30.0 * TIME_FACTOR
pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "POLL_S", 0.05)
    monkeypatch.setattr(sink, "MAX_BACKOFF_S", 0.2)


class Copy:
    """A ledger and its sink."""

    def __init__(self, folder: Path, postgres: Postgres) -> None:
        self.postgres, self.folder = postgres, folder
        self.db = ledger.open_ledger(folder)
        self.node = ledger.node(self.db)
        self.number = 0
        self.sink = self.start()

    def start(self) -> Sink:
        self.sink = Sink(self.postgres.url, self.folder, timeout_s=1.0)
        self.sink.start()
        return self.sink

    def add(self, count: int) -> None:
        first, self.number = self.number, self.number + count
        ledger.insert(self.db, [record(f"{self.node}-{i}") for i in range(first, self.number)])

    def there(self) -> str:
        return self.postgres.query(
            f"SELECT count(*), count(DISTINCT id), sum(billable) FROM evap_usage WHERE node = '{self.node}'"
        )

    def complete(self) -> None:
        expected = f"{self.number}|{self.number}|{20 * self.number}"
        eventually(lambda: self.there() == expected, self.there, WAIT_S)


@pytest.fixture
def copy(tmp_path: Path, postgres: Postgres) -> Iterator[Copy]:
    it = Copy(tmp_path, postgres)
    yield it
    it.sink.stop()
    it.db.close()


def test_records_arrive_once_and_whole(copy: Copy) -> None:
    copy.add(1200)  # more than a batch
    copy.complete()
    odd = record("odd-" + copy.node, operation='it\'s "odd" \u2603 \\', opened_us=(1 << 53) + 1, end="budget")
    ledger.insert(copy.db, [odd])
    select = f"SELECT operation, opened_us FROM evap_usage WHERE id = '{odd.id}'"
    eventually(
        lambda: copy.postgres.query(select) == f"{odd.operation}|{odd.opened_us}",
        lambda: copy.postgres.query(select), WAIT_S,
    )  # fmt: skip
    assert copy.sink.copied == 1201


def test_a_new_sink_goes_on_where_the_last_one_stopped(copy: Copy) -> None:
    copy.add(10)
    copy.complete()
    copy.sink.stop(WAIT_S)
    copy.add(5)
    copy.start()
    copy.complete()
    eventually(lambda: copy.sink.copied == 5, "five are copied", WAIT_S)
    copy.postgres.query(f"DELETE FROM evap_usage WHERE node = '{copy.node}'")
    copy.sink.stop(WAIT_S)
    copy.start()
    copy.complete()


def test_it_outlives_a_crash_of_the_database(copy: Copy) -> None:
    copy.add(10)
    copy.complete()
    copy.postgres.stop()
    copy.add(10)
    eventually(lambda: copy.sink.error, "it says that the database is away", WAIT_S)
    copy.postgres.start()
    copy.complete()
    eventually(lambda: not copy.sink.error, "it says that the database is back", WAIT_S)


def test_it_outlives_a_frozen_database(copy: Copy) -> None:
    copy.add(3)
    copy.complete()
    copy.postgres.freeze()
    copy.add(10)
    eventually(lambda: copy.sink.error, "it says that the database is away", WAIT_S)
    copy.postgres.thaw()
    copy.complete()


def test_streams_do_not_notice_a_frozen_database(postgres: Postgres, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "ignore_eos": True}
    flags = ("--synthetic-step-ms", "0", "--data-dir", str(tmp_path), "--usage-sink", postgres.url)
    with (
        running(*flags) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=WAIT_S) as client,
    ):

        def ask() -> str:
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            return str(answer.json()["id"])

        first = ask()
        there = "SELECT count(*) FROM evap_usage WHERE id "
        eventually(lambda: postgres.query(f"{there} = '{first}'") == "1", "the first is copied", WAIT_S)
        postgres.freeze()
        try:
            ids = [ask() for _ in range(50)]
            assert client.get("/v1/usage").json()["data"][0]["exchanges"] == 51, "durable here, whatever is there"
            assert client.get("/ready").status_code == 200
        finally:
            postgres.thaw()
        names = ",".join(f"'{id}'" for id in ids)
        eventually(lambda: postgres.query(f"{there} IN ({names})") == "50", "the others are copied", WAIT_S)
        assert "evap_sink_records_total" in client.get("/metrics").text


def test_what_is_no_url_is_said(tmp_path: Path) -> None:
    pytest.importorskip("asyncpg", reason="needs asyncpg (the postgres extra)")
    with pytest.raises(StartupError, match="postgresql://"):
        Sink("mysql://x", tmp_path)


def test_without_asyncpg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(StartupError, match="asyncpg") as error:
        Sink("postgresql://x", tmp_path)
    assert "evap[postgres]" in error.value.remedy
