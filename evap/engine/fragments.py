"""The fragment table: token id -> JSON-escaped UTF-8 text in a fixed-width field, written straight into a row.

JSON allows spaces after a string's closing quote, so `text"` padded with spaces makes every row equally long.
A token is fast when its text is whole characters, not special, and fits. What comes before it cannot change that: a
detokenizer that holds something back (`holding`) takes the next token itself, also a generation's first one where the
tokenizer drops a leading space there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from evap.engine.vocabulary import Pieces, Vocabulary

WIDTH: Final = 24
_RANDOM_RUNS: Final = 2000
_RUN_TOKENS: Final = 12
#: Real text of several scripts, for runs of tokens that occur together.
_SAMPLE: Final = (
    "The quick brown fox said: \"it's 3.14159, isn't it?\"\n\n\tdef f(x):\n        return {'a': [1, 2, x]}  # ok\r\n"
    "Grüße, café naïve ď — “quotes” … ¿qué? 你好,世界。 こんにちは 삼겹살 привет мир"
    " שלום مرحبا नमस्ते 👩‍👩‍👧 🏳️‍🌈\\n</div>\x00\x1f\x7f"
)


class FragmentTable:
    """See `Fragments` in interface: `text` is (vocab,) V24, `fast` is (vocab,) bool."""

    __slots__ = ("fast", "text", "width")

    def __init__(self, text: npt.NDArray[np.void], fast: npt.NDArray[np.bool_], width: int) -> None:
        self.width = width
        self.text = text
        self.fast = fast


def build_fragments(tokenizer: Tokenizer, vocabulary: Vocabulary) -> tuple[FragmentTable | None, str]:
    """The table, or None and why there is none: the decoder is unsuitable, or a check against it failed."""
    pieces = vocabulary.pieces
    if pieces is None:
        return None, vocabulary.why
    cells: list[bytes] = []
    fast = np.zeros(vocabulary.size, np.bool_)
    blank = b'"'.ljust(WIDTH)
    for i, data in enumerate(pieces.rest):
        cell = _cell(data) if i not in vocabulary.special else None
        fast[i] = cell is not None
        cells.append(cell or blank)
    table = FragmentTable(np.frombuffer(b"".join(cells), f"V{WIDTH}"), fast, WIDTH)
    wrong = check(tokenizer, pieces, table)
    return (None, wrong) if wrong else (table, "")


def _cell(data: bytes) -> bytes | None:
    """Escaped text, quote and spaces; None when it is no whole text, empty, or too long."""
    if not data or len(data) >= WIDTH:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    escaped = msgspec.json.encode(text)[1:]
    return escaped.ljust(WIDTH) if len(escaped) <= WIDTH else None


def check(tokenizer: Tokenizer, pieces: Pieces, table: FragmentTable) -> str:
    """ "" when runs of fast tokens, random and real, read from the table as the tokenizer decodes them."""
    runs = [run for run in _runs(tokenizer, table) if run]
    for run, expected in zip(runs, tokenizer.decode_batch(runs, skip_special_tokens=False), strict=True):
        cells = [table.text[i].tobytes().rstrip(b" ") for i in run]
        text = pieces.first[run[0]].decode()
        for cell in cells[1:]:
            text += str(msgspec.json.decode(b'"' + cell))
        inside = str(msgspec.json.decode(b'"' + cells[0]))
        if text != expected or inside != pieces.rest[run[0]].decode():
            return f"the fragment table disagrees with the tokenizer's decoder near token {run[0]}"
    return ""


def _runs(tokenizer: Tokenizer, table: FragmentTable) -> list[list[int]]:
    ids: Sequence[int] = np.flatnonzero(table.fast).tolist()
    if not ids:
        return []
    source = random.Random(1)  # noqa: S311  (a fixed sample, not a secret)
    runs = [source.choices(ids, k=_RUN_TOKENS) for _ in range(_RANDOM_RUNS)]
    run: list[int] = []
    for i in tokenizer.encode(_SAMPLE, add_special_tokens=False).ids:
        if table.fast[i]:
            run.append(i)
        else:
            runs.append(run)
            run = []
    return [*runs, run]
