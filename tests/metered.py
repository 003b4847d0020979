"""Everything but sockets, with accounts: requests through the app, with keys and a ledger in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evap.accounting import Accounting
from evap.app import App, send_error
from evap.config import Config, EngineConfig, MeterConfig, ProtocolConfig
from evap.dispatch import Dispatch, Shell
from evap.engine.synthetic import SyntheticReplica, SyntheticText
from evap.exchange import Exchange
from evap.metering import keys, ledger
from evap.metering.record import Record
from evap.metrics import Metrics
from evap.protocol.events import RequestReady
from evap.protocol.rows import RowTable
from tests.fakes import FakeCore, FakeLoop, FakeReply, head, run_now

SLOTS = 64
WALL_S = 1_700_000_000


class Metered:
    """keys: name -> settings, as the key file has them; `secrets` has what was made for each."""

    def __init__(
        self, folder: Path, *, ledger: bool = True, key_settings: dict[str, dict[str, Any]] | None = None,
        meter: dict[str, Any] | None = None, protocol: dict[str, Any] | None = None, **engine: Any,
    ) -> None:  # fmt: skip
        self.folder = folder / "data"
        self.key_file = folder / "keys.toml"
        self.secrets = {name: keys.create(self.key_file, name, s) for name, s in (key_settings or {}).items()}
        self.loop, self.core = FakeLoop(), FakeCore()
        self.settled: list[Exchange] = []
        self.config = Config(
            engine=EngineConfig(**{"synthetic_step_ms": 1.0, "synthetic_tokens": 12, **engine}),
            protocol=ProtocolConfig(**{"stream_buffer_bytes": 1024, **(protocol or {})}),
            meter=MeterConfig(**{
                "data_dir": str(self.folder) if ledger else "", "api_keys": str(self.key_file) if key_settings else "",
                **(meter or {}),
            }),
        )  # fmt: skip
        self.accounting = Accounting(
            self.config.meter, model="synthetic", slots=SLOTS, now_ns=self._now_ns, wall_ns=self._wall_ns
        )
        self.accounting.open()
        self.replica = SyntheticReplica(self.config.engine, self.loop)
        self.metrics = Metrics("synthetic")
        self.dispatch = Dispatch(
            self.config, text=SyntheticText(), replica=self.replica, rows=RowTable(SLOTS), model="synthetic",
            shell=Shell(
                now_ns=self._now_ns, wall_s=lambda: WALL_S + self.loop.now, soon=self.loop.call_soon,
                later=self.loop.call_later,
                in_pool=self._in_pool, flush=lambda: None,
                settled=self.settled.append, log_exception=pytest.fail, send_error=send_error,
            ),
            accounting=self.accounting, live=self.metrics.live,
        )  # fmt: skip
        self.replica.listen(self.dispatch.steps.on_batch, lambda state, line: None)
        with pytest.raises(StopIteration):
            self.replica.start().send(None)
        self.app = App(self.config, self.dispatch, self.metrics, created_s=WALL_S, background=run_now)
        self._streams = iter(range(1, 100_000, 2))

    def _now_ns(self) -> int:
        return int(self.loop.now * 1e9)

    def _wall_ns(self) -> int:
        return WALL_S * 1_000_000_000 + self._now_ns()

    @staticmethod
    def _in_pool(work: Any, back: Any) -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - as the real pool does it
            result = error
        back(result)

    def send(
        self, method: str, path: str, body: Any = None, *, key: str = "", query: str = "", **headers: str
    ) -> FakeReply:
        reply = FakeReply(self.core, next(self._streams))
        if key:
            headers["authorization"] = f"Bearer {self.secrets.get(key, key)}"
        data = b"" if body is None else json.dumps(body).encode()
        request = head(method, path, **headers)
        self.app.on_event(RequestReady(reply, type(request)(**{f: getattr(request, f) for f in request.__slots__}
                                                            | {"query": query}), data))  # fmt: skip
        return reply

    def ask(self, *, key: str = "", headers: dict[str, str] | None = None, **fields: Any) -> FakeReply:
        body = {"messages": [{"role": "user", "content": "hello"}], **fields}
        return self.send("POST", "/v1/chat/completions", body, key=key, **(headers or {}))

    def get(self, path: str, *, key: str = "", query: str = "") -> Any:
        reply = self.send("GET", path, key=key, query=query)
        assert reply.status == 200, reply.body
        return json.loads(reply.body)

    def records(self) -> list[Record]:
        """What is durable, in the order of settling."""
        assert self.accounting.recorder is not None
        assert self.accounting.recorder.flush(20.0)
        with ledger.reading(self.folder) as db:
            return [record for _, record in ledger.rows(db, ledger.Filter())]

    def die(self) -> None:
        """As kill -9 leaves it: the ledger's thread writes nothing more, and the lock is gone."""
        assert self.accounting.recorder is not None
        self.accounting.recorder.close()
        if self.accounting._lock is not None:
            import os

            os.close(self.accounting._lock)
            self.accounting._lock = None


def error_of(reply: FakeReply) -> Any:
    return json.loads(reply.body)["error"]
