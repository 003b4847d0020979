"""The copy to a real PostgreSQL from a server of several processes: outages of either side, and each record once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.clients.asking import eventually
from tests.many import ask, loops, numbers, records
from tests.metering.postgres import Postgres
from tests.support import STOP_TIMEOUT_S, Server, running

pytestmark = pytest.mark.postgres


def ask_all(server: Server, count: int) -> None:
    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(lambda n: ask(server, "w", n % 9 + 1).status_code, range(count))] == [200] * count


def ready(server: Server) -> str:
    """What every one of some connections is told, if they are told the same."""
    answers = {httpx.get(server.url + "/ready", trust_env=False, timeout=STOP_TIMEOUT_S).text for _ in range(6)}
    return answers.pop() if len(answers) == 1 else ""


def test_each_record_arrives_once_whatever_is_away(postgres: Postgres, tmp_path: Path) -> None:
    def there() -> str:
        return postgres.query(
            "SELECT count(*), count(DISTINCT id), count(DISTINCT seq), sum(delivered) FROM evap_usage"
        )

    def complete() -> bool:
        rows = records(tmp_path)
        return there() == f"{len(rows)}|{len(rows)}|{len(rows)}|{sum(r.delivered for r in rows)}"

    flags = ("--workers", "2", "--synthetic-step-ms", "0", "--data-dir", str(tmp_path), "--usage-sink", postgres.url)
    with running(*flags) as server:
        ask_all(server, 30)
        eventually(complete, "all is copied", STOP_TIMEOUT_S)
        assert "degraded" not in ready(server)
        postgres.stop()
        ask_all(server, 30)  # nobody notices
        eventually(lambda: "usage sink" in ready(server), "every process says that it is behind", STOP_TIMEOUT_S)
        page = numbers(server)
        assert (page["evap_sink_ok"], page["evap_ledger_ok"], page["evap_sink_records_total"]) == (0, 1, 30)
        loops(server)[0].kill()
        server.wait_log("starts again")
        eventually(lambda: len(loops(server)) == 2, "a new one serves", STOP_TIMEOUT_S)
        ask_all(server, 10)
    with running(*flags) as server:  # while the database is still away
        ask_all(server, 10)
        postgres.start()
        eventually(complete, "what was written before and since is there", STOP_TIMEOUT_S)
        eventually(lambda: "degraded" not in ready(server), "nothing is behind", STOP_TIMEOUT_S)
        assert numbers(server)["evap_sink_records_total"] == len(records(tmp_path)) - 30
        postgres.freeze()
        try:
            ask_all(server, 20)
        finally:
            postgres.thaw()
        eventually(complete, "also what came while it was frozen", STOP_TIMEOUT_S)
    assert len(records(tmp_path)) == 100
