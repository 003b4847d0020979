"""Token id -> exact bytes, for tokenizers whose decoder works token by token.

Which ones do is read from the decoder in tokenizer.json and then checked against the tokenizer's own decode. For the
others (`Vocabulary.pieces` is None) text comes from decoding windows of ids, and there is no fragment table.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: (content of a token) -> (bytes inside a text, bytes at its very start)
_Rule = Callable[[str], tuple[bytes, bytes]]
_BYTE_TOKEN_LENGTH: Final = len("<0x00>")
_CHECK_RUN: Final = 16


class Pieces(msgspec.Struct, frozen=True):
    """What each token id adds to a text. Lists of `size` entries; ids without a token add nothing.

    rest: bytes after other text; first: bytes at the start (the same list when there is no difference);
    rest_shown, first_shown: the same with special tokens by name instead of skipped;
    is_byte: 1 for tokens that stand for one byte of a run (byte fallback), else None.
    """

    rest: list[bytes]
    first: list[bytes]
    rest_shown: list[bytes]
    first_shown: list[bytes]
    is_byte: bytes | None

    @property
    def start_differs(self) -> bool:
        return self.first is not self.rest


class Vocabulary(msgspec.Struct, frozen=True):
    """A tokenizer's tokens. `why` says why there are no pieces. size covers the model's ids, also unused ones."""

    size: int
    names: list[str | None]
    special: frozenset[int]
    pieces: Pieces | None
    why: str = ""


def byte_alphabet() -> dict[str, int]:
    """Character of byte-level BPE -> byte (GPT-2's bytes_to_unicode, turned round)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    others = (b for b in range(256) if b not in set(plain))
    table.update({chr(256 + i): b for i, b in enumerate(others)})
    return table


def load_vocabulary(tokenizer: Tokenizer, model_size: int = 0) -> Vocabulary:
    """Read a tokenizer's tokens. model_size: rows of the model's embedding, which may exceed the tokenizer's ids."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    size = max(model_size, max(vocab.values(), default=-1) + 1)
    names: list[str | None] = [None] * size
    for content, i in vocab.items():
        names[i] = content
    added = tokenizer.get_added_tokens_decoder()
    for i, token in added.items():
        names[i] = token.content
    special = frozenset(i for i, token in added.items() if token.special)
    decoder = tokenizer.decoder
    spec = json.loads(decoder.__getstate__()) if decoder is not None else None
    rule, fallback, why = _rule(spec)
    if rule is None:
        return Vocabulary(size, names, special, None, why)
    pieces = _pieces(names, special, rule, fallback)
    wrong = _disagreement(tokenizer, pieces, special)
    if wrong:
        return Vocabulary(size, names, special, None, wrong)
    return Vocabulary(size, names, special, pieces)


def _pieces(names: Sequence[str | None], special: frozenset[int], rule: _Rule, fallback: bool) -> Pieces:
    rest: list[bytes] = []
    first: list[bytes] = []
    is_byte = bytearray(len(names))
    for i, name in enumerate(names):
        inside, start = rule(name) if name is not None else (b"", b"")
        if fallback and name is not None and _fallback_byte(name) >= 0:
            is_byte[i] = 1
        rest.append(inside)
        first.append(start)
    if first == rest:
        first = rest
    hidden = _without(rest, special)
    return Pieces(
        rest=hidden,
        first=hidden if first is rest else _without(first, special),
        rest_shown=rest,
        first_shown=first,
        is_byte=bytes(is_byte) if fallback else None,
    )


def _without(table: list[bytes], special: frozenset[int]) -> list[bytes]:
    hidden = list(table)
    for i in special:
        hidden[i] = b""
    return hidden


def _rule(spec: Any) -> tuple[_Rule | None, bool, str]:
    """(rule, whether byte tokens form runs, why there is no rule) for a decoder's JSON."""
    if spec is None:
        return (lambda name: ((" " + name).encode(), name.encode())), False, ""
    kind = spec.get("type")
    if kind == "ByteLevel":
        return _byte_level, False, ""
    if kind == "Metaspace":
        return _metaspace(spec), False, ""
    if kind == "Sequence":
        rule = _sequence(spec["decoders"])
        if rule is not None:
            return rule, any(d["type"] == "ByteFallback" for d in spec["decoders"]), ""
        kind = "Sequence of " + ", ".join(d.get("type", "?") for d in spec["decoders"])
    return None, False, f"its decoder ({kind}) does not work token by token"


_ALPHABET: Final = byte_alphabet()


def _byte_level(name: str) -> tuple[bytes, bytes]:
    try:
        data = bytes([_ALPHABET[c] for c in name])
    except KeyError:  # an added token with other characters stands for itself
        data = name.encode()
    return data, data


def _metaspace(spec: dict[str, Any]) -> _Rule:
    mark = spec["replacement"]
    keeps = spec.get("prepend_scheme", "always") == "never"

    def rule(name: str) -> tuple[bytes, bytes]:
        inside = name.replace(mark, " ").encode()
        return inside, inside if keeps else name.replace(mark, "").encode()

    return rule


def _sequence(decoders: list[dict[str, Any]]) -> _Rule | None:
    """Replace*, then ByteFallback, Fuse and Strip(" ", 1, 0) as far as they are there: SentencePiece's decoders."""
    kinds = [d["type"] for d in decoders]
    if kinds == ["ByteLevel"]:
        return _byte_level
    swaps: list[tuple[str, str]] = []
    while kinds and kinds[0] == "Replace":
        pattern = decoders[len(swaps)]["pattern"].get("String")
        if pattern is None:
            return None
        swaps.append((pattern, decoders[len(swaps)]["content"]))
        kinds.pop(0)
    fallback = kinds[:1] == ["ByteFallback"]
    tail = kinds[1:] if fallback else kinds
    strip = decoders[-1] if tail == ["Fuse", "Strip"] else None
    if strip is None and tail not in ([], ["Fuse"]):
        return None
    if strip is not None and (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
        return None

    def rule(name: str) -> tuple[bytes, bytes]:
        for old, new in swaps:
            name = name.replace(old, new)
        byte = _fallback_byte(name) if fallback else -1
        data = bytes([byte]) if byte >= 0 else name.encode()
        return data, data.removeprefix(b" ") if strip else data

    return rule


def _fallback_byte(name: str) -> int:
    """Value of a byte-fallback token `<0xE2>`, -1 for any other."""
    if len(name) == _BYTE_TOKEN_LENGTH and name.startswith("<0x") and name.endswith(">"):
        try:
            return int(name[3:5], 16)
        except ValueError:
            return -1
    return -1


def _disagreement(tokenizer: Tokenizer, pieces: Pieces, special: frozenset[int]) -> str:
    """What the tokenizer's own decode says otherwise about some token, or "". Every token is looked at."""
    from evap.engine.detokenizer import piece_stream  # noqa: PLC0415  (it imports this module)

    size = len(pieces.rest)
    ids = list(range(size))
    random.Random(0).shuffle(ids)  # noqa: S311  (a fixed sample, not a secret)
    runs = [ids[i : i + _CHECK_RUN] for i in range(0, size, _CHECK_RUN)]
    if pieces.start_differs:
        runs += [[i] for i in ids]
    for skip in (True, False):
        for run, expected in zip(runs, tokenizer.decode_batch(runs, skip_special_tokens=skip), strict=True):
            stream = piece_stream(pieces, special=special, skip_special=skip)
            if stream.push(run) + stream.finish() != expected and not _has_run(pieces, run):
                return f"its decoder disagrees with the table near token {run[0]}"
    return ""


def _has_run(pieces: Pieces, ids: Sequence[int]) -> bool:
    """Byte tokens beside each other: an invalid run makes decode() take back what was certain already."""
    if pieces.is_byte is None:
        return False
    flags = [pieces.is_byte[i] for i in ids if pieces.rest[i]]
    return any(a and b for a, b in itertools.pairwise(flags))
