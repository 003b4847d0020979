"""What a tree of processes listens on, as the kernel says it."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def tree(pid: int) -> list[int]:
    """A process and everything below it."""
    root = psutil.Process(pid)
    return [pid, *(child.pid for child in root.children(recursive=True))]


def tcp_ports(pids: Iterable[int]) -> set[int]:
    """TCP ports with a listener among these processes."""
    found: set[int] = set()
    for pid in pids:
        for c in psutil.Process(pid).net_connections("tcp"):
            if c.status == psutil.CONN_LISTEN:
                found.add(c.laddr.port)
    return found
