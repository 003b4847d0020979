"""`python -m evap usage`: what people and programs read."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from evap.__main__ import main
from evap.metering import ledger
from tests.metering.rows import DAY_US, record

PRICES = "[models.m]\nprompt = 1\ncached = 0.5\ncompletion = 3\n[models.n]\nprompt = 2\ncompletion = 2\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    db = ledger.open_ledger(tmp_path)
    day = 20_484 * DAY_US  # 2026-01-31
    ledger.insert(
        db,
        [
            record("a", opened_us=day),
            record("b", opened_us=day, model="n", operation="=cmd()"),
            record("c", opened_us=day + DAY_US, key="bob", billable=5_000_000),
            record("d", opened_us=day + DAY_US, key="bob", computed=0, emitted=0, delivered=0, billable=0),
        ],
    )
    db.close()
    (tmp_path / "prices.toml").write_text(PRICES)
    return tmp_path


def usage(folder: Path, *argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["usage", "--data-dir", str(folder), *argv]) == 0
    return capsys.readouterr().out


def test_a_table_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = usage(folder, capsys=capsys)
    lines = out.splitlines()
    assert lines[0].split() == ["day", "model", "key", "exchanges", "prompt", "cached", "computed", "emitted",
                                "delivered", "billable"]  # fmt: skip
    assert lines[3].split() == ["2026-02-01", "m", "bob", "2", "20", "8", "20", "20", "20", "5,000,000"]
    assert len({len(line) for line in lines}) == 1
    assert usage(folder, "--from", "2030-01-01", capsys=capsys) == "no usage\n"
    assert "a   alice" in usage(folder, "--group-by", "exchange", capsys=capsys)


def test_json_lines_with_exact_costs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = ("--prices", str(folder / "prices.toml"), "--format", "jsonl")
    rows = [json.loads(line) for line in usage(folder, "--group-by", "key", *prices, capsys=capsys).splitlines()]
    alice, bob = rows
    # a: 6 at 1, 4 cached at 0.5, 20 at 3; b: 30 at 2; per million
    assert (alice["key"], alice["cost"]) == ("alice", "0.000128")
    assert (bob["key"], bob["cost"]) == ("bob", "15.000008"), "a prompt that gave no token costs nothing"
    each = [json.loads(x) for x in usage(folder, "--group-by", "exchange", *prices, capsys=capsys).splitlines()]
    assert [row["cost"] for row in each] == ["0.000068", "0.00006", "15.000008", "0"]
    total = usage(folder, "--group-by", "", "--key", "bob", *prices, capsys=capsys)
    assert json.loads(total)["exchanges"] == 2


def test_a_sum_over_a_model_without_price_has_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "prices.toml").write_text("[models.m]\nprompt = 1\ncompletion = 1\n")
    argv = ("--prices", str(folder / "prices.toml"), "--format", "jsonl", "--group-by", "day")
    rows = [json.loads(line) for line in usage(folder, *argv, capsys=capsys).splitlines()]
    assert rows[0].get("cost") is None
    assert rows[1]["cost"]


def test_csv_is_read_back_and_holds_no_formula(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = usage(folder, "--format", "csv", "--group-by", "exchange", "--to", "2026-01-31", capsys=capsys)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["id"] for row in rows] == ["a", "b"]
    assert rows[1]["operation"] == "'=cmd()"
    assert rows[0]["prompt"] == "10"


def test_parquet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (the parquet extra)")
    target = folder / "usage.parquet"
    usage(folder, "--format", "parquet", "--group-by", "exchange", "--output", str(target), capsys=capsys)
    rows = parquet.read_table(target).to_pylist()
    assert [row["billable"] for row in rows] == [20, 20, 5_000_000, 0]


def test_into_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = folder / "out.jsonl"
    assert usage(folder, "--format", "jsonl", "--output", str(target), capsys=capsys) == ""
    assert len(target.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "argv",
    [("--group-by", "user"), ("--group-by", "exchange,day"), ("--from", "x"), ("--prices", "/absent.toml"),
     ("--format", "parquet"), ("--output", "/absent/x")],
)  # fmt: skip
def test_mistakes_end_with_2(folder: Path, argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--data-dir", str(folder), *argv]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_no_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVAP_DATA_DIR", raising=False)
    assert main(["usage"]) == 2
    assert main(["usage", "--data-dir", str(tmp_path)]) == 2
    assert "there is no ledger" in capsys.readouterr().err
