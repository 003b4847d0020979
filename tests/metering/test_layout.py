"""The layout is said three times: in Python, in the kernels, in the ring. They must say the same."""

from __future__ import annotations

import re

import pytest

from evap import messages, ring
from evap.metering import build, layout

SOURCE = build.KERNELS.read_text()
CONSTANTS = dict(re.findall(r"^constexpr \w+ (\w+) = (0x[0-9A-Fa-f]+|\d+)[ul]*;", SOURCE, re.MULTILINE))
ELSEWHERE = {
    "FINISH_STOP": messages.Finish.STOP,
    "FINISH_LENGTH": messages.Finish.LENGTH,
    "SILENT": messages.SILENT,
    "JOIN_WORDS": len(layout.JOIN_FIELDS),
    "MAX_THREADS": 1024,
}


def test_the_kernels_state_the_numbers_they_use() -> None:
    assert len(CONSTANTS) == SOURCE.count("\nconstexpr ")


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_agree(name: str) -> None:
    expected = ELSEWHERE.get(name, getattr(ring, name, getattr(layout, name, None)))
    assert int(CONSTANTS[name], 0) == expected


def fields_of(struct: str) -> list[tuple[str, str]]:
    """(name, dtype) of a struct of the kernels."""
    body = re.search(rf"struct {struct} {{(.*?)}};", SOURCE, re.DOTALL)
    assert body
    dtypes = {"u32": "<u4", "u64": "<u8", "int": "<i4"}
    lines = re.findall(r"(\w+) ([\w, ]+);", body[1])
    return [(name.strip(), dtypes[kind]) for kind, names in lines for name in names.split(",")]


def test_structs_agree_and_have_no_padding() -> None:
    for struct, dtype in (("Slot", layout.SLOT_DTYPE), ("Meter", layout.METER_DTYPE)):
        assert dtype.names is not None
        assert fields_of(struct) == [(name, dtype[name].str) for name in dtype.names]
        offset = 0
        for name in dtype.names:
            assert dtype.fields is not None
            assert dtype.fields[name][1] == offset
            assert offset % dtype[name].itemsize == 0  # so a C compiler puts it there too
            offset += dtype[name].itemsize
        assert dtype.itemsize == offset
        assert offset % 8 == 0


def test_lines_are_aligned_to_cache_lines_and_do_not_share_them() -> None:
    for word in (layout.WORD_STEP_LINE, layout.WORD_ROWS, layout.page_words(7)):
        assert word * 8 % layout.LINE_BYTES == 0
    assert layout.LINE_BYTES == layout.LINE_WORDS * 8
    assert ring.WORD_HEAD * 8 // layout.LINE_BYTES != ring.WORD_TAIL * 8 // layout.LINE_BYTES


def test_tags_never_become_zero() -> None:
    tag = 0
    for _ in range(layout.LINE_TAGS + 2):
        tag = layout.next_tag(tag)
        assert 1 <= tag <= layout.LINE_TAGS
    assert tag == 2


@pytest.mark.parametrize("slots", [0, -1, layout.MAX_SLOTS + 1])
def test_slot_counts_out_of_range_are_refused(slots: int) -> None:
    with pytest.raises(ValueError, match="slots"):
        layout.page_bytes(slots)
