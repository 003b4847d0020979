"""Runs in vLLM's worker process: the meter, right after sampling."""

from __future__ import annotations

from typing import Any


class Meter:
    """Mixed into vLLM's worker by `worker_extension_cls`."""

    def evap_install(self, settings: dict[str, Any]) -> bool:
        return False
