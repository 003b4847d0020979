"""Another process that sees a page and a ring: prints, as JSON, the records it read and the rows at the end.

    observer.py PATH SLOTS CAPACITY RING_AT RECORDS

It ends when it has seen RECORDS records. It uses no CUDA.
"""

from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path

from evap.metering.page import PageReader
from evap.ring import RingReader


def main(path: str, slots: int, capacity: int, ring_at: int, records: int) -> None:
    with Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    view = memoryview(memory)
    reader, tokens = PageReader(view[:ring_at]), RingReader(view[ring_at:], capacity)
    seen: list[list[int]] = []
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while tokens.position < records:
        before, batch = reader.heartbeat(), tokens.poll()
        if batch is not None:
            columns = (batch.slot, batch.generation, batch.token, batch.index, batch.flags)
            seen += [list(row) for row in zip(*(c.tolist() for c in columns), strict=True)]
        assert reader.heartbeat() >= before
    sys.stdin.readline()  # the parent has synchronised
    rows = {slot: reader.row(slot) for slot in range(slots)}
    line = reader.step_line()
    sys.stdout.write(json.dumps({"records": seen, "lost": tokens.lost, "rows": rows, "line": line}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *(int(a) for a in sys.argv[2:]))
