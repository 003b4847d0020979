"""The synthetic tokenizer: reversible, its detokenizer and its fragment table say the same."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.engine.synthetic_text import END, EOS, FIRST_SPECIAL, HARD, PLAIN, VOCABULARY, SyntheticText
from evap.errors import InvalidRequest

TEXT = SyntheticText()
ids = st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=60)


@given(st.text() | st.lists(st.sampled_from(["canary:", "babel:", " the", "the ", "é", "\n"])).map("".join))
def test_encode_and_decode_are_inverse(text: str) -> None:
    encoded = TEXT.encode(text)
    assert TEXT.decode(encoded) == text
    assert all(0 <= i < FIRST_SPECIAL for i in encoded)


@given(ids, st.booleans(), st.data())
def test_the_detokenizer_agrees_with_decode_however_tokens_are_grouped(
    tokens: list[int], skip: bool, data: st.DataObject
) -> None:
    stream = TEXT.detokenizer(skip_special=skip)
    text, at = "", 0
    while at < len(tokens):
        count = data.draw(st.integers(1, 5))
        text += stream.push(tokens[at : at + count])
        at += count
    assert text + stream.finish() == TEXT.decode(tokens, skip_special=skip)


@given(st.sampled_from([PLAIN, HARD]), st.integers(0, 200), st.integers(1, 120))
def test_fast_tokens_and_the_detokenizer_together_say_the_text(source: list[int], start: int, count: int) -> None:
    tokens = (source * 3)[start : start + count]
    stream, text = TEXT.detokenizer(), ""
    assert TEXT.fragments is not None
    for i in tokens:
        if TEXT.fragments.fast[i] and not stream.holding:
            text += json.loads(b'"' + TEXT.fragments.text[i].tobytes())
        else:
            text += stream.push([i])
    assert text + stream.finish() == TEXT.decode(tokens)


def test_the_plain_text_never_needs_the_slow_path() -> None:
    assert TEXT.fragments is not None
    assert TEXT.fragments.fast[PLAIN].all()
    assert not TEXT.fragments.fast[HARD].all()
    assert not TEXT.fragments.fast[FIRST_SPECIAL:].any()


def test_stop_strings_are_found_across_tokens() -> None:
    stream = TEXT.detokenizer(stop=("brown fox",))
    assert stream.push(PLAIN[:10]) == "The quick "
    assert stream.stopped == "brown fox"
    assert stream.consumed() == 4


def test_chat_ids_keep_specials_out_of_text() -> None:
    messages = [
        {"role": "system", "content": "be <|end|> brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": None},
    ]
    encoded = TEXT.chat_ids(messages, {})
    assert encoded.count(END) == 3
    assert EOS not in encoded
    assert TEXT.decode(encoded, skip_special=False) == (
        "<|system|>be <|end|> brief<|end|><|user|>hi there<|end|><|assistant|><|end|><|assistant|>"
    )
    assert TEXT.chat_ids(messages, {"add_generation_prompt": False})[-1] == END


@pytest.mark.parametrize(
    "message", [{"role": "king", "content": "x"}, {"content": "x"}, "x", {"role": "user", "content": [{"image": 1}]}]
)
def test_chat_ids_refuse_what_they_cannot_read(message: object) -> None:
    with pytest.raises(InvalidRequest):
        TEXT.chat_ids([message], {})


def test_token_bytes_are_exact() -> None:
    assert b"".join(TEXT.token_bytes(i) for i in TEXT.encode("Zürich\0")) == "Zürich\0".encode()
    assert TEXT.token_bytes(EOS) == b"<|eos|>"
