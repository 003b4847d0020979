"""Numbers of several processes add up; what the system says of each stands beside each other."""

from __future__ import annotations

import os
import subprocess
import sys

from evap.snapshot import Snapshot, counted, merged, of_process, of_python


def one(tokens: float, ready: float, usage: float, connections: float) -> Snapshot:
    values = {
        "evap_tokens": {"prompt": tokens}, "evap_ready": {"": ready}, "evap_kv_cache_usage": {"": usage},
        "evap_connections": {"": connections},
    }  # fmt: skip
    families = {name: ("gauge", name, "") for name in ("evap_ready", "evap_kv_cache_usage", "evap_connections")}
    return Snapshot(values, {"evap_gap": ([1, 0, 2], 0.5)}, families)


def test_counts_are_added_and_states_are_judged() -> None:
    whole = merged([one(3, 1, 0.2, 5), one(4, 0, 0.7, 6)])
    assert whole.values == {
        "evap_tokens": {"prompt": 7.0}, "evap_ready": {"": 0}, "evap_kv_cache_usage": {"": 0.7},
        "evap_connections": {"": 11.0},
    }  # fmt: skip
    assert whole.histograms == {"evap_gap": ([2, 0, 4], 1.0)}
    assert counted(whole).values == {"evap_tokens": {"prompt": 7.0}}
    assert counted(whole).families == {}


def test_what_the_system_says_of_each() -> None:
    told = [sys.executable, "-c", "print('up', flush=True); input()"]
    with subprocess.Popen(told, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"  # before, it may have no memory to speak of
        both = merged([of_process("parent", os.getpid()), of_process("0", child.pid)])
        memory = both.values["process_resident_memory_bytes"]
        assert memory.keys() == {"parent", "0"}
        assert min(memory.values()) > 1 << 20
        assert both.families["process_cpu_seconds"][::2] == ("counter", "process")
        assert both.values["process_open_fds"]["0"] >= 3
        child.communicate(b"\n")
    assert "process_cpu_seconds" not in of_process("0", child.pid).values, "it is gone"


def test_what_python_says_is_added_up() -> None:
    both = merged([of_python(), of_python()])
    assert both.values["python_gc_collections"].keys() == {"0", "1", "2"}
    assert both.families["python_gc_collections"][::2] == ("counter", "generation")
