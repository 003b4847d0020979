from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from evap.engine.vocabulary import byte_alphabet, load_vocabulary
from tests.engine import small_tokenizers as small

TABLES = {"byte_level", "qwen", "roberta", "llama2", "gemma", "phi", "metaspace", "word_level"}


@pytest.mark.parametrize("name", sorted(small.ALL))
def test_which_tokenizers_have_a_table(name: str) -> None:
    vocabulary = load_vocabulary(small.ALL[name]())
    assert (vocabulary.pieces is not None) == (name in TABLES), vocabulary.why
    assert bool(vocabulary.why) == (name not in TABLES)


def test_byte_alphabet_is_a_bijection() -> None:
    table = byte_alphabet()
    assert sorted(table.values()) == list(range(256))
    assert table["A"] == 0x41
    assert table["Ġ"] == 0x20


def test_bytes_of_tokens() -> None:
    tokenizer = small.llama2()
    vocabulary = load_vocabulary(tokenizer)
    pieces = vocabulary.pieces
    assert pieces is not None
    assert pieces.rest[small.token_id(tokenizer, "\u2581world")] == b" world"
    assert pieces.first[small.token_id(tokenizer, "\u2581world")] == b"world"
    assert pieces.first[small.token_id(tokenizer, "\u2581\u2581")] == b" "  # one space is stripped, not all
    assert pieces.rest[small.token_id(tokenizer, "<0xE2>")] == b"\xe2"
    assert pieces.rest[small.token_id(tokenizer, "</s>")] == b""
    assert pieces.rest_shown[small.token_id(tokenizer, "</s>")] == b"</s>"


def test_a_model_may_have_more_ids_than_its_tokenizer() -> None:
    vocabulary = load_vocabulary(small.byte_level(), model_size=1000)
    assert vocabulary.size == 1000
    assert vocabulary.pieces is not None
    assert vocabulary.pieces.rest[999] == b""
    assert load_vocabulary(small.byte_level(), model_size=10).size == small.byte_level().get_vocab_size()


def test_added_tokens_decode_as_the_library_decodes_them() -> None:
    """Characters of the byte alphabet stand for bytes even there; others for themselves."""
    tokenizer = Tokenizer.from_str(small.byte_level().to_str())
    tokenizer.add_tokens([AddedToken("é", normalized=False), AddedToken("<a b>"), AddedToken("日本", normalized=False)])
    pieces = load_vocabulary(tokenizer).pieces
    assert pieces is not None
    assert pieces.rest[small.token_id(tokenizer, "é")] == b"\xe9"
    assert pieces.rest[small.token_id(tokenizer, "<a b>")] == b"<a b>"
    assert pieces.rest[small.token_id(tokenizer, "日本")] == "日本".encode()


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.BPEDecoder(),
        decoders.CTC(),
    ],
)
def test_unknown_decoders_have_no_table(decoder: decoders.Decoder) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b</w>": 1}, unk_token="a"))
    tokenizer.decoder = decoder
    vocabulary = load_vocabulary(tokenizer)
    assert vocabulary.pieces is None
    assert "token by token" in vocabulary.why


def test_a_table_that_the_decoder_disagrees_with_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evap.engine.vocabulary._byte_level", lambda name: (name.encode(), name.encode()))
    vocabulary = load_vocabulary(small.byte_level())
    assert vocabulary.pieces is None
    assert "disagrees" in vocabulary.why
