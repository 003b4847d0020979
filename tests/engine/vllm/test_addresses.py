"""Where an engine and its users meet."""

from __future__ import annotations

from pathlib import Path

from evap.engine.vllm.addresses import addresses


def test_each_process_has_two_of_its_own() -> None:
    found = addresses(Path("/dev/shm/evap-vllm-4194304-abcdefgh"), 64)
    assert [address.number for address in found] == list(range(64))
    names = {name for address in found for name in (address.input, address.output)}
    assert len(names) == 128
    assert all(name.startswith("ipc:///dev/shm/") and len(name) < 100 for name in names)  # a path of at most 107 octets
