"""Who sees which usage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from evap.metering.energy import Energy
from tests.metered import Metered
from tests.metering.test_energy import Board

PRICES = "[models.synthetic]\nprompt = 1\ncompletion = 2.5\n"


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Metered]:
    (tmp_path / "prices.toml").write_text(PRICES)
    metered = Metered(
        tmp_path, key_settings={"alice": {}, "bob": {}, "root": {"admin": True}},
        meter={"prices": str(tmp_path / "prices.toml")},
    )  # fmt: skip
    for key, tokens in (("alice", 3), ("alice", 4), ("bob", 5)):
        metered.ask(key=key, max_tokens=tokens, ignore_eos=True)
        metered.loop.run()
    yield metered
    metered.accounting.close()


def test_a_key_sees_its_own_and_an_admin_all(it: Metered) -> None:
    (mine,) = it.get("/v1/usage", key="alice")["data"]
    assert (mine["day"], mine["exchanges"], mine["billable"]) == ("2023-11-14", 2, 7)
    rows = it.get("/v1/usage", key="root", query="group_by=key")["data"]
    assert {row["key"]: row["emitted"] for row in rows} == {"alice": 7, "bob": 5}
    assert it.get("/v1/usage", key="root", query="group_by=")["data"][0]["emitted"] == 12
    assert it.get("/v1/usage", key="root", query="key=bob")["data"][0]["emitted"] == 5
    assert it.send("GET", "/v1/usage", key="alice", query="key=bob").status == 403
    assert it.get("/v1/usage", key="alice", query="from=2030-01-01")["data"] == []
    assert it.send("GET", "/v1/usage", key="alice", query="from=x").status == 400


def test_exchanges_in_pages(it: Metered) -> None:
    first = it.get("/v1/usage", key="root", query="group_by=exchange&limit=2")
    rest = it.get("/v1/usage", key="root", query=f"group_by=exchange&limit=2&after={first['next_after']}")
    assert [row["emitted"] for row in first["data"] + rest["data"]] == [3, 4, 5]
    assert "next_after" not in rest


def test_one_exchange_is_for_its_key(it: Metered) -> None:
    id = it.records()[0].id
    for source in ("memory", "ledger"):
        if source == "ledger":
            it.accounting.recent.clear()
        assert it.get(f"/v1/usage/{id}", key="alice")["emitted"] == 3
        assert it.get(f"/v1/usage/{id}", key="root")["emitted"] == 3
        assert it.send("GET", f"/v1/usage/{id}", key="bob").status == 404
    assert it.send("GET", "/v1/usage/chatcmpl-unknown", key="root").status == 404


def test_a_running_one_is_for_its_key(it: Metered) -> None:
    reply = it.ask(key="alice", stream=True, max_tokens=50, ignore_eos=True)
    id = reply.events[0]["id"]
    assert it.get(f"/v1/usage/{id}", key="alice")["state"] == "running"
    assert it.send("GET", f"/v1/usage/{id}", key="bob").status == 404
    it.dispatch.cancelled(reply, "client_gone")
    assert it.get(f"/v1/usage/{id}", key="alice")["end"] == "client_abort"


def test_costs_are_exact(it: Metered) -> None:
    record = it.records()[0]
    found = it.get(f"/v1/usage/{record.id}", key="alice")
    expected = f"{(record.prompt * 10 + 3 * 25):07d}"
    assert found["cost"] == f"0.{expected}".rstrip("0")
    assert found["currency"] == "USD"
    rows = it.get("/v1/usage", key="root", query="group_by=model")["data"]
    assert float(rows[0]["cost"]) == pytest.approx((3 * record.prompt + 2.5 * 12) / 1e6)
    assert "cost" not in it.get("/v1/usage", key="root")["data"][0], "models are not told apart there"


def test_a_ledger_that_cannot_be_read(it: Metered) -> None:
    (it.folder / "ledger.sqlite3").unlink()
    reply = it.send("GET", "/v1/usage", key="root")
    assert reply.status == 500
    assert json.loads(reply.body)["error"]["type"] == "server_error"


def test_energy_is_an_estimate_beside_the_counts(it: Metered) -> None:
    it.accounting.energy = Energy(Board(600))
    reply = it.ask(max_tokens=3, key="alice")
    it.loop.run()
    id = json.loads(reply.body)["id"]
    assert "energy_mj_estimated" not in it.get(f"/v1/usage/{id}", key="alice")
    it.accounting.tick(list(it.dispatch.open))
    assert it.get(f"/v1/usage/{id}", key="alice")["energy_mj_estimated"] == 600
