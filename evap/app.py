"""Which handler answers a request, and how errors become answers. No I/O.

Small answers (models, health, metrics) are given here; what generates goes to `dispatch.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from evap import __version__
from evap.config import Config
from evap.copies import Copies, Later
from evap.dispatch import Dispatch
from evap.errors import Draining, EvapError, InternalError
from evap.messages import ReplicaState
from evap.metrics import CONTENT_TYPE, Metrics
from evap.outlet import BLOCK_HEADERS
from evap.protocol.api import health, models
from evap.protocol.api.router import Match, dialects, route
from evap.protocol.events import (
    Event,
    HeaderList,
    PeerGone,
    PriorityChanged,
    Reply,
    RequestHead,
    RequestReady,
    StreamCancelled,
    WindowOpened,
)
from evap.protocol.headers import JSON, echoed_if_valid, error_body, error_headers, wire_code
from evap.protocol.spool import Body
from evap.siblings import Siblings
from evap.snapshot import read_snapshot
from evap.usage import Background, UsagePages

logger = logging.getLogger("evap.app")
_JSON_HEADERS: Final = ((b"content-type", JSON),)
_METRICS_HEADERS: Final = ((b"content-type", CONTENT_TYPE),)


def send_error(reply: Reply, error: EvapError, headers: HeaderList = ()) -> int:
    """Answer with `error` as a whole, and `headers` in its head; returns the status."""
    status = wire_code(error)[0]
    reply.whole(status, [*error_headers(error), *headers], error_body(error))
    return status


class App:
    """One per process: events in, replies out."""

    def __init__(
        self,
        config: Config,
        dispatch: Dispatch,
        metrics: Metrics,
        *,
        created_s: int,
        background: Background,
        structured_output: bool = False,
        hung: Callable[[], str] = str,
    ) -> None:
        self._config = config
        self._dispatch = dispatch
        self._metrics = metrics
        self._created_s = created_s
        self._dialects = dialects(structured_output=structured_output)
        self._hung = hung
        self._siblings: Siblings | None = None
        self._fetch = dispatch.blocks.fetch
        self.usage = UsagePages(
            dispatch.accounting, counts=dispatch.steps.counts, background=background, send_error=send_error,
            policy=config.meter.billable, answered=metrics.answered,
        )  # fmt: skip
        if dispatch.large is not None:
            dispatch.large.refuse = self._refuse
        #: last line that the replica said of itself, for /ready
        self.detail = ""
        self._handlers: dict[str, Callable[[Reply, RequestHead, Match], None]] = {
            "health": self._health,
            "ready": self._ready,
            "version": self._version,
            "models": self._models,
            "model": self._model,
            "metrics": self._metrics_page,
            "options": self._options,
        }

    def join(self, siblings: Siblings, later: Later) -> None:
        """There are other processes of this server, which can be asked."""
        self._siblings = self.usage.siblings = siblings
        self._fetch = Copies(self._dispatch.blocks, siblings, later).fetch

    def on_event(self, event: Event) -> None:
        """Everything that any connection reports. Never raises: one request's fault is not another's."""
        match event:
            case RequestReady(reply=reply, head=head, body=body):
                self._request(reply, head, body)
            case StreamCancelled(reply=reply, reason=reason):
                self._dispatch.cancelled(reply, reason)
            case WindowOpened(reply=reply):
                self._dispatch.window_opened(reply)
            case PriorityChanged(reply=reply, value=value):
                self._dispatch.prioritized(reply, value)
            case PeerGone():
                pass

    def admit(self, head: RequestHead) -> EvapError | None:
        """Why a request needs no body to be refused: no such route, no key, no room. Asked before an upload begins."""
        try:
            found = route(head.method, head.path)
            account = None if found.public else self._dispatch.accounting.authenticate(head)
            if found.name in self._dialects:
                length = head.get(b"content-length")
                self._dispatch.may_wait(account, head, head, int(length) if length is not None else 0)
        except EvapError as error:
            return error
        return None

    def _request(self, reply: Reply, head: RequestHead, body: Body) -> None:
        try:
            found = route(head.method, head.path)
            account = None if found.public else self._dispatch.accounting.authenticate(head)
            dialect = self._dialects.get(found.name)
            if dialect is not None:
                self._dispatch.generate(reply, head, body, dialect, account, found.name)
            elif found.name == "block":
                key = account.key.id if account is not None else ""
                self._fetch(head.path, key, reply, self._block)
            elif found.name == "usage":
                self.usage.list(reply, head, account)
            elif found.name == "usage_one":
                self.usage.one(reply, found.argument, account)
            else:
                self._handlers[found.name](reply, head, found)
        except Exception as error:  # noqa: BLE001 - judged there
            self._refuse(reply, head, error)

    def _refuse(self, reply: Reply, head: RequestHead, error: Exception) -> None:
        """A request that no exchange was made for."""
        if isinstance(error, Draining):
            reply.refuse()
            self._metrics.answered(503)
            return
        if isinstance(error, EvapError):
            self._dispatch.note(error)
        else:
            logger.error("a request handler failed", exc_info=error)
            error = InternalError("the server failed to handle this request")
        self._metrics.answered(send_error(reply, error, echoed_if_valid(head)))

    def _answer(self, reply: Reply, body: bytes, status: int = 200) -> None:
        reply.whole(status, _JSON_HEADERS, body)
        self._metrics.answered(status)

    def _block(self, reply: Reply, body: bytes | EvapError) -> None:
        if isinstance(body, EvapError):
            self._metrics.answered(send_error(reply, body))
            return
        reply.whole(200, BLOCK_HEADERS, body)
        self._metrics.answered(200)

    def _health(self, reply: Reply, head: RequestHead, found: Match) -> None:
        self._answer(reply, health.health_body())

    def _ready(self, reply: Reply, head: RequestHead, found: Match) -> None:
        states = [(self._dispatch.replica.state, self.detail)]
        accounting = self._dispatch.accounting
        status, body = health.ready_body(
            states, draining=self._dispatch.draining, hung=self._hung(), trouble=accounting.trouble
        )
        self._answer(reply, body, status)

    def _version(self, reply: Reply, head: RequestHead, found: Match) -> None:
        ready = self._dispatch.replica.state is ReplicaState.READY
        self._answer(reply, health.version_body(__version__, self._dispatch.replica.info if ready else None))

    def _cards(self) -> list[models.ModelCard]:
        ready = self._dispatch.replica.state is ReplicaState.READY
        context = self._dispatch.replica.info.max_model_len if ready else None
        base, adapters = self._dispatch.model, self._dispatch.replica.adapters
        card = partial(models.ModelCard, created=self._created_s, max_model_len=context)
        return [card(id=base), *(card(id=name, parent=base) for name in adapters)]

    def _models(self, reply: Reply, head: RequestHead, found: Match) -> None:
        self._answer(reply, models.list_body(self._cards()))

    def _model(self, reply: Reply, head: RequestHead, found: Match) -> None:
        self._answer(reply, models.model_body(self._cards(), found.argument))

    def _metrics_page(self, reply: Reply, head: RequestHead, found: Match) -> None:
        self._metrics.answered(200)
        if self._siblings is None:
            reply.whole(200, _METRICS_HEADERS, self._metrics.render())
        else:
            self._siblings.ask("metrics", "", lambda data: self._sums(reply, data))

    def _sums(self, reply: Reply, data: bytes) -> None:
        """data: the other processes' numbers, added up."""
        reply.whole(200, _METRICS_HEADERS, self._metrics.render([read_snapshot(data)] if data else []))

    def _options(self, reply: Reply, head: RequestHead, found: Match) -> None:
        reply.whole(204, ((b"allow", found.allow.encode()),), b"")
        self._metrics.answered(204)
