"""`GET /health` (the process answers), `GET /ready` (it can generate), `GET /version`."""

from __future__ import annotations

from collections.abc import Sequence

from evap.messages import EngineInfo, ReplicaState
from evap.protocol.api import sse


def health_body() -> bytes:
    """Liveness: says nothing about engines on purpose; restarting the process would not start them sooner."""
    return b'{"status":"ok"}'


def ready_body(
    states: Sequence[tuple[ReplicaState, str]], *, draining: bool, hung: str = "", trouble: str = ""
) -> tuple[int, bytes]:
    """(status, body) from the state and last line of each replica: 200 when new requests are taken, else 503.

    hung: how the engine makes no progress though it has work. trouble: what does not work, though requests are taken.
    """
    ready = not draining and not hung and any(state is ReplicaState.READY for state, _ in states)
    well = "degraded" if trouble else "ready"
    body = {
        "status": "draining" if draining else "hung" if hung else well if ready else "unavailable",
        "replicas": [{"state": state.value, "detail": detail} for state, detail in states],
    }
    if hung or trouble:
        body["trouble"] = hung or trouble
    return (200 if ready else 503), sse.encode(body)


def version_body(version: str, engine: EngineInfo | None) -> bytes:
    """evap's version, and the engine's once it runs."""
    about = None if engine is None else {"name": engine.engine, "version": engine.version, "device": engine.device}
    return sse.encode({"version": version, "engine": about})
