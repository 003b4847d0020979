"""Binary layout of the counters page, shared with `kernels.cu` (a test compares the two). The ring's is in `evap.ring`.

All words are little-endian u64 at their natural alignment.

    byte 0      header line, by the host, once: magic, version << 32 | slots, device clock and Unix clock (ns) at the
                page's time zero, a nonce of this boot
    byte 128    step line, by the engine after every step: see STEP_FIELDS
    byte 256    engine rows, 64 bytes a slot, by the engine: see ROW_FIELDS

Whose exchange a slot belongs to, and what of it left the server, is in the loop's own table (`opened.py`).

Words of the step line and of rows are `tag << 48 | value`: a 16-bit tag, 1..65535 in turn, and a 48-bit value. A writer
gives all eight words of a line the next tag; a reader takes a line only if the eight tags agree. So no line can be read
torn, in whatever order stores become visible, unless a line is written exactly 65,535 times between two loads of one
look. A tag is never 0: zeroed memory holds no line. A line has one writer; its counts only grow within a generation.

Order is needed in two places. Whoever sees step N in the step line sees every row as of step N, or later: the engine
puts a fence before the step line. And a writer that dies in a line has written word 0 last, so that words of two
generations are never taken for one (`PageReader.last_row`); this rests on the order of stores of x86 or of a kernel
that ran to its end.
"""

from __future__ import annotations

from typing import Final

import numpy as np

PAGE_MAGIC: Final = int.from_bytes(b"EVAPPAGE", "little")
PAGE_VERSION: Final = 2
LINE_WORDS: Final = 8
LINE_BYTES: Final = 64
VALUE_BITS: Final = 48
VALUE_MASK: Final = (1 << VALUE_BITS) - 1
LINE_TAGS: Final = 65535  #: tags 1..LINE_TAGS
MAX_SLOTS: Final = 1 << 16

WORD_MAGIC: Final = 0
WORD_SHAPE: Final = 1
WORD_EPOCH_DEVICE_NS: Final = 2
WORD_EPOCH_UNIX_NS: Final = 3
WORD_NONCE: Final = 4
WORD_STEP_LINE: Final = 16
WORD_ROWS: Final = 32

#: step: steps since the page was made (the heartbeat). records: head of the ring. computed, emitted: tokens, all slots.
#: begin_us, end_us: of the last step, since time zero. busy_us: sum of step times. rows: rows of the last step.
STEP_FIELDS: Final = ("step", "records", "computed", "emitted", "begin_us", "end_us", "busy_us", "rows")
#: state: generation | finish << 16 (see messages.Finish). prompt, cached: tokens. computed: tokens sampled; emitted: of
#: those, up to the end token or the limit. first_us, last_us: of tokens, since time zero. steps: that it took part in.
ROW_FIELDS: Final = ("state", "prompt", "cached", "computed", "emitted", "first_us", "last_us", "steps")

#: What a slot starts with, int32 each: the columns of `meter_begin`'s list. eos -1: none. limit: most tokens emitted.
JOIN_FIELDS: Final = ("slot", "generation", "prompt", "cached", "limit", "eos")
#: Device-resident state of a slot and of the meter (struct Slot and struct Meter of the kernels).
SLOT_DTYPE: Final = np.dtype(
    [
        *((name, "<u4") for name in ("generation", "tag", "limit", "prompt", "cached", "computed", "emitted")),
        *((name, "<u4") for name in ("steps", "finish")),
        ("eos", "<i4"),
        ("first_us", "<u8"),
        ("last_us", "<u8"),
    ]
)
METER_DTYPE: Final = np.dtype(
    [(name, "<u8") for name in ("head", "step", "tag", "computed", "emitted", "begin_ns", "busy_ns", "epoch_ns")]
)


def page_bytes(slots: int) -> int:
    """Bytes of a counters page. Raises ValueError for a slot count out of range."""
    if not 1 <= slots <= MAX_SLOTS:
        raise ValueError(f"{slots} slots are not in 1..{MAX_SLOTS}")
    return page_words(slots) * 8


def page_words(slots: int) -> int:
    """Words of a page: up to the end of the engine rows."""
    return WORD_ROWS + slots * LINE_WORDS


def next_tag(tag: int) -> int:
    """The line tag after `tag`; 0 (never written) is followed by 1."""
    return tag % LINE_TAGS + 1
