from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.engine.detokenizer import detokenizer
from evap.engine.fragments import WIDTH, FragmentTable, build_fragments, check
from evap.engine.vocabulary import load_vocabulary
from tests.engine import small_tokenizers as small

NAMES = ["byte_level", "qwen", "roberta", "llama2", "gemma", "phi", "metaspace", "word_level"]
BUILT = {name: build_fragments(small.ALL[name](), load_vocabulary(small.ALL[name]())) for name in NAMES}


def table_of(name: str) -> FragmentTable:
    table, why = BUILT[name]
    assert table is not None, why
    return table


def cell(table: FragmentTable, token: int) -> bytes:
    return bytes(table.text[token].tobytes())


@pytest.mark.parametrize("name", NAMES)
def test_shape_and_width(name: str) -> None:
    table = table_of(name)
    size = load_vocabulary(small.ALL[name]()).size
    assert table.width == WIDTH == 24
    assert table.text.dtype == np.dtype("V24")
    assert table.text.shape == table.fast.shape == (size,)
    assert table.fast.dtype == np.bool_


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_the_end_of_a_json_string(name: str) -> None:
    table = table_of(name)
    pieces = load_vocabulary(small.ALL[name]()).pieces
    assert pieces is not None
    for i in range(len(table.text)):
        raw = b'"' + cell(table, i)
        text = json.loads(raw)
        assert text == msgspec.json.decode(raw)
        assert b"\n" not in raw
        assert b"\r" not in raw  # an event's data line must stay one line
        assert text == (pieces.rest[i].decode() if table.fast[i] else "")


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_slow(name: str) -> None:
    table = table_of(name)
    assert not any(table.fast[i] for i in load_vocabulary(small.ALL[name]()).special)


def test_parts_of_characters_and_long_texts_are_slow() -> None:
    tokenizer = small.byte_level()
    table = table_of("byte_level")
    assert not table.fast[small.token_id(tokenizer, "ì")]  # byte 0xEC alone
    assert table.fast[small.token_id(tokenizer, "Ġ")]
    assert cell(table, small.token_id(tokenizer, "Ċ")).rstrip() == b'\\n"'
    assert cell(table, small.token_id(tokenizer, '"')).rstrip() == b'\\""'
    assert cell(table, small.token_id(tokenizer, "\\")).rstrip() == b'\\\\"'


@pytest.mark.parametrize(("length", "fast"), [(22, True), (23, True), (24, False), (200, False)])
def test_a_text_must_fit_with_its_quote(length: int, fast: bool) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(small.byte_level().to_str())
    tokenizer.add_tokens(["x" * length])
    table, why = build_fragments(tokenizer, load_vocabulary(tokenizer))
    assert table is not None, why
    assert table.fast[small.token_id(tokenizer, "x" * length)] == fast


def test_ids_without_a_token_are_slow() -> None:
    table, _ = build_fragments(small.byte_level(), load_vocabulary(small.byte_level(), 1000))
    assert table is not None
    assert not table.fast[small.byte_level().get_vocab_size() :].any()


@given(st.data())
def test_rows_and_detokenizer_together_are_what_decode_gives(data: st.DataObject) -> None:
    """The exchange's rule: a fast token comes from the table unless something is held back."""
    name = data.draw(st.sampled_from(NAMES))
    tokenizer, table = small.ALL[name](), table_of(name)
    vocabulary = load_vocabulary(tokenizer)
    if name in ("llama2", "gemma", "phi"):
        ids = tokenizer.encode(
            data.draw(st.text(st.sampled_from("ab o삼ď👩\n"), max_size=10)), add_special_tokens=False
        ).ids
    else:
        ids = data.draw(st.lists(st.integers(0, vocabulary.size - 1), max_size=12))
    stream = detokenizer(tokenizer, vocabulary)
    out = ""
    for i in ids:
        if table.fast[i] and not stream.holding:
            out += json.loads(b'"' + cell(table, i))
        else:
            out += stream.push([i])
    assert out + stream.finish() == tokenizer.decode(ids)


def test_a_table_that_disagrees_with_the_decoder_is_found() -> None:
    tokenizer, table = small.byte_level(), table_of("byte_level")
    pieces = load_vocabulary(tokenizer).pieces
    assert pieces is not None
    wrong = table.text.copy()
    wrong[small.token_id(tokenizer, "Ġthe")] = b'the"'.ljust(24)
    assert "disagrees" in check(tokenizer, pieces, FragmentTable(wrong, table.fast, 24))


def test_no_table_without_pieces() -> None:
    table, why = build_fragments(small.word_piece(), load_vocabulary(small.word_piece()))
    assert table is None
    assert "WordPiece" in why
