from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.engine.detokenizer import TextStream, detokenizer, piece_stream
from evap.engine.vocabulary import Pieces, Vocabulary, load_vocabulary
from tests.engine import small_tokenizers as small
from tests.engine.test_stop_strings import reference

BAD = "\N{REPLACEMENT CHARACTER}"
HARD = "삼겹살👩‍👩‍👧ď"

VOCABULARIES = {name: load_vocabulary(make()) for name, make in small.ALL.items()}


def table(*tokens: bytes) -> Pieces:
    rest = list(tokens)
    return Pieces(rest=rest, first=rest, rest_shown=rest, first_shown=rest, is_byte=None)


def plain(pieces: Pieces) -> TextStream:
    return TextStream(piece_stream(pieces, special=frozenset()))


def groups(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """The ids in order, in groups of any size."""
    out = []
    while ids:
        n = data.draw(st.integers(1, len(ids)))
        out.append(ids[:n])
        ids = ids[n:]
    return out


def run(stream: TextStream, portions: list[list[int]]) -> str:
    return "".join([stream.push(p) for p in portions]) + stream.finish()


def test_characters_cut_anywhere() -> None:
    """dynamo#12630: bytes of a character in several tokens never become U+FFFD."""
    data = HARD.encode()
    for a, b in itertools.combinations(range(1, len(data)), 2):
        stream = plain(table(data[:a], data[a:b], data[b:]))
        shown = [stream.push([0]), stream.push([1]), stream.push([2])]
        assert "".join(shown) == HARD
        assert not stream.holding
        assert shown[0] == data[:a].decode(errors="ignore")


def test_each_byte_its_own_token() -> None:
    stream = plain(table(*[bytes([b]) for b in range(256)]))
    shown = [stream.push([b]) for b in HARD.encode()]
    assert "".join(shown) == HARD
    assert BAD not in "".join(shown)


def test_a_character_cut_by_max_tokens_ends_as_one_replacement() -> None:
    stream = plain(table("👩".encode()[:2]))
    assert stream.push([0]) == ""
    assert stream.holding
    assert stream.finish() == BAD
    assert not stream.holding


@given(st.data())
def test_byte_level_text_is_what_decode_gives(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["byte_level", "qwen", "roberta"]))
    tokenizer, vocabulary = small.ALL[name](), VOCABULARIES[name]
    ids = data.draw(st.lists(st.integers(0, vocabulary.size - 1), max_size=20))
    skip = data.draw(st.booleans())
    stream = detokenizer(tokenizer, vocabulary, skip_special=skip)
    assert run(stream, groups(data, ids)) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert stream.consumed() == len(ids)


words = st.text(st.sampled_from("ab eo\n삼ď👩é  "), max_size=12)


@given(st.data(), words)
def test_text_of_every_decoder_is_what_decode_gives(data: st.DataObject, text: str) -> None:
    """Valid sequences: ids that the tokenizer itself made, and special tokens between them."""
    name = data.draw(st.sampled_from(sorted(small.ALL)))
    tokenizer, vocabulary = small.ALL[name](), VOCABULARIES[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    at = data.draw(st.integers(0, len(ids)))
    if vocabulary.pieces is None or vocabulary.pieces.is_byte is None:
        ids[at:at] = data.draw(st.lists(st.sampled_from(sorted(vocabulary.special)), max_size=2))
    skip = data.draw(st.booleans())
    stream = detokenizer(tokenizer, vocabulary, skip_special=skip)
    assert run(stream, groups(data, ids)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.data())
def test_random_tokens_of_sentencepiece(data: st.DataObject) -> None:
    """Any ids, but no two byte tokens side by side: those are looked at below."""
    name = data.draw(st.sampled_from(["llama2", "gemma", "phi", "metaspace", "word_level"]))
    tokenizer, vocabulary = small.ALL[name](), VOCABULARIES[name]
    pieces = vocabulary.pieces
    assert pieces is not None
    ids = data.draw(st.lists(st.integers(0, vocabulary.size - 1), max_size=20))
    skip = data.draw(st.booleans())
    if pieces.is_byte is not None:
        hidden = vocabulary.special if skip else frozenset()
        flags = [pieces.is_byte[i] for i in ids if i not in hidden]
        if any(a and b for a, b in itertools.pairwise(flags)):
            return
    stream = detokenizer(tokenizer, vocabulary, skip_special=skip)
    assert run(stream, groups(data, ids)) == tokenizer.decode(ids, skip_special_tokens=skip)


def byte_ids(vocabulary: Vocabulary, data: bytes) -> list[int]:
    return [vocabulary.names.index(f"<0x{b:02X}>") for b in data]


def fallback_reference(data: bytes) -> str:
    """Whole characters, then one U+FFFD for each byte from the first that fits nowhere."""
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        return data[: e.start].decode() + BAD * (len(data) - e.start)


@given(st.binary(min_size=1, max_size=6))
def test_runs_of_byte_tokens(data: bytes) -> None:
    """As decode() while the run is valid; decode() would also take back the characters before a broken place."""
    tokenizer, vocabulary = small.gemma(), VOCABULARIES["gemma"]
    ids = byte_ids(vocabulary, data)
    shown = run(detokenizer(tokenizer, vocabulary), [[i] for i in ids])
    assert shown == fallback_reference(data)
    if BAD not in shown or shown == BAD * len(data):
        assert shown == tokenizer.decode(ids)


def test_a_byte_run_gives_characters_as_they_are_complete() -> None:
    vocabulary = VOCABULARIES["gemma"]
    stream = detokenizer(small.gemma(), vocabulary)
    assert [stream.push([i]) for i in byte_ids(vocabulary, "€ď".encode())] == ["", "", "€", "", "ď"]


def test_a_broken_byte_run_ends_with_the_next_word() -> None:
    tokenizer, vocabulary = small.gemma(), VOCABULARIES["gemma"]
    ids = [*byte_ids(vocabulary, b"\xe2\x82"), *tokenizer.encode("the", add_special_tokens=False).ids]
    assert run(detokenizer(tokenizer, vocabulary), [[i] for i in ids]) == tokenizer.decode(ids) == BAD * 2 + "the"


@pytest.mark.parametrize("name", ["llama2", "metaspace"])
def test_leading_space_depends_on_the_prompt(name: str) -> None:
    tokenizer, vocabulary = small.ALL[name](), VOCABULARIES[name]
    prompt = tokenizer.encode("The capital of France", add_special_tokens=False).ids
    whole = tokenizer.encode("The capital of France is Paris", add_special_tokens=False).ids
    answer = whole[len(prompt) :]
    assert whole[: len(prompt)] == prompt
    assert run(detokenizer(tokenizer, vocabulary, prompt_ids=prompt), [answer]) == " is Paris"
    alone = detokenizer(tokenizer, vocabulary)
    assert alone.holding  # the first token cannot come from a table
    assert run(alone, [[i] for i in answer]) == "is Paris"
    only_special = detokenizer(tokenizer, vocabulary, prompt_ids=[1])
    assert run(only_special, [answer]) == "is Paris"


@pytest.mark.parametrize("name", ["byte_level", "gemma"])
def test_a_character_that_the_prompt_began(name: str) -> None:
    tokenizer, vocabulary = small.ALL[name](), VOCABULARIES[name]
    pieces = vocabulary.pieces
    assert pieces is not None
    one = {
        b: byte_ids(vocabulary, bytes([b]))[0] if pieces.is_byte else pieces.rest.index(bytes([b]))
        for b in b"\xe2\x82\xaca"
    }
    prompt = [one[0x61], one[0xE2], one[0x82]]
    completed = detokenizer(tokenizer, vocabulary, prompt_ids=prompt)
    assert completed.holding
    assert run(completed, [[one[0xAC]]]) == "€"
    other = detokenizer(tokenizer, vocabulary, prompt_ids=prompt)
    assert run(other, [[one[0x61]]]) == "a"  # the broken character is the prompt's, not ours
    assert run(detokenizer(tokenizer, vocabulary, prompt_ids=prompt), []) == ""


@given(st.data(), words, st.lists(st.text("ab eo\n삼", min_size=1, max_size=3), min_size=1, max_size=3), st.booleans())
def test_stop_strings(data: st.DataObject, text: str, stops: list[str], include: bool) -> None:
    name = data.draw(st.sampled_from(["byte_level", "llama2", "word_piece"]))
    tokenizer, vocabulary = small.ALL[name](), VOCABULARIES[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = detokenizer(tokenizer, vocabulary, stop=tuple(stops), include_stop=include)
    shown = run(stream, groups(data, ids))
    assert (shown, stream.stopped) == reference(tokenizer.decode(ids), stops, include)


def test_consumed_counts_to_the_token_that_completed_the_stop() -> None:
    stream = TextStream(piece_stream(table(b"DEF", b"G", b"HI", b"J", b"after"), special=frozenset()), ["DEFGHIJ"])
    assert stream.push([0, 1, 2, 3, 4, 4]) == ""
    assert stream.stopped == "DEFGHIJ"
    assert stream.consumed() == 4
    assert stream.push([4]) == stream.finish() == ""
    assert stream.consumed() == 4


def test_a_stop_string_over_a_cut_character() -> None:
    data = "x삼y".encode()
    stream = TextStream(piece_stream(table(data[:2], data[2:]), special=frozenset()), ["삼"])
    assert stream.push([0]) == "x"
    assert stream.push([1]) == ""
    assert stream.stopped == "삼"


def test_held_prefix_comes_out_at_the_end() -> None:
    stream = TextStream(piece_stream(table(b"abc"), special=frozenset()), ["cde"])
    assert stream.push([0]) == "ab"
    assert stream.holding
    assert stream.finish() == "c"
    assert stream.stopped is None


@pytest.mark.parametrize("name", sorted(small.ALL))
def test_windows_give_the_same_text(name: str) -> None:
    """The way for unknown decoders, on tokenizers for which there is a table to compare with."""
    tokenizer = small.ALL[name]()
    vocabulary = msgspec.structs.replace(VOCABULARIES[name], pieces=None)
    for text in ["The quick brown fox, isn't it?", "hello 삼겹살 world 👩‍👩‍👧", " a  b"]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert run(detokenizer(tokenizer, vocabulary), [[i] for i in ids]) == tokenizer.decode(ids)
