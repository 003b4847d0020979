"""Token ids -> text of one generation, incrementally: held-back UTF-8, stop strings, special tokens.

Three ways to text, one way out. Byte-level tokenizers: bytes through an incremental UTF-8 decoder. SentencePiece with
byte fallback: the same, but a broken run of byte tokens becomes one U+FFFD per byte, as its decoder does. Any other
decoder: a window of ids is decoded again for each token. What leaves is independent of how tokens were grouped.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from evap.engine.stop_strings import StopMatcher
from evap.engine.vocabulary import Pieces, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BAD: Final = "\N{REPLACEMENT CHARACTER}"
#: Tokens of the prompt that a window starts with: more than any character or word needs.
_PROMPT_WINDOW: Final = 8


class _Stream(Protocol):
    """Text of ids so far. `pending`: the next token cannot be looked at alone."""

    pending: bool

    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class _ByteStream:
    """Pieces joined as bytes; U+FFFD by maximal subparts (Unicode 16, 3.9), as both Rust and Python decode."""

    __slots__ = ("_borrowed", "_first", "_held", "_hidden", "_rest", "pending")

    def __init__(self, rest: list[bytes], first: list[bytes] | None, hidden: frozenset[int], held: bytes) -> None:
        self._rest = rest
        self._first = first  #: until the first token; None when there is nothing special about it
        self._hidden = hidden
        self._held = held
        self._borrowed = bool(held)  #: held bytes are the prompt's: shown only if the generation completes them
        self.pending = bool(held) or first is not None

    def push(self, ids: Sequence[int]) -> str:
        rest = self._rest
        if self.pending and self._first is not None:
            data = self._start(ids)
        else:
            data = rest[ids[0]] if len(ids) == 1 else b"".join([rest[i] for i in ids])
        if not self._held:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        elif self._borrowed and data:
            self._held = _if_continued(self._held, data)
            self._borrowed = False
        data = self._held + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        self.pending = bool(self._held) or self._first is not None
        return text

    def _start(self, ids: Sequence[int]) -> bytes:
        first = self._first
        for n, i in enumerate(ids):
            if i not in self._hidden and first is not None:
                self._first = None
                self.pending = bool(self._held)
                return first[i] + b"".join([self._rest[j] for j in ids[n + 1 :]])
        return b""

    def finish(self) -> str:
        held = b"" if self._borrowed else self._held
        self._held = b""
        self.pending = False
        return held.decode(errors="replace")


class _FallbackStream:
    """Byte tokens form runs: whole characters leave at once; once a run is broken, each of its bytes is U+FFFD."""

    __slots__ = ("_borrowed", "_broken", "_first", "_held", "_hidden", "_is_byte", "_rest", "pending")

    def __init__(
        self, rest: list[bytes], first: list[bytes] | None, is_byte: bytes, hidden: frozenset[int], held: bytes
    ) -> None:
        self._rest = rest
        self._first = first
        self._is_byte = is_byte
        self._hidden = hidden
        self._held = held
        self._borrowed = bool(held)
        self._broken = False
        self.pending = bool(held) or first is not None

    def push(self, ids: Sequence[int]) -> str:
        out: list[str] = []
        for i in ids:
            if i in self._hidden:
                continue
            data = self._rest[i]
            if self._first is not None:
                data, self._first = self._first[i], None
            if self._is_byte[i]:
                out.append(self._byte(data))
            else:
                out.append(self._flush())
                out.append(data.decode())
        # inside a broken run the next byte token is not what its table entry says, hence _broken
        self.pending = bool(self._held) or self._broken or self._first is not None
        return "".join(out)

    def _byte(self, data: bytes) -> str:
        if self._borrowed and data:
            self._held = _if_continued(self._held, data)
            self._borrowed = False
        if self._broken:
            return _BAD * len(data)
        self._held += data
        try:
            text, used = codecs.utf_8_decode(self._held, "strict", False)
        except UnicodeDecodeError:
            self._broken = True
            text, used = _BAD * len(self._held), len(self._held)
        self._held = self._held[used:]
        return text

    def _flush(self) -> str:
        lost = 0 if self._borrowed else len(self._held)
        self._held = b""
        self._broken = self._borrowed = False
        return _BAD * lost

    def finish(self) -> str:
        self.pending = False
        return self._flush()


class _WindowStream:
    """Any decoder: text of (window + new ids) minus text of the window, while it does not end in U+FFFD."""

    __slots__ = ("_emitted", "_ids", "_read", "_skip", "_start", "_tokenizer", "_total", "pending")

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._ids = list(prompt_ids[-_PROMPT_WINDOW:])
        self._start = 0  #: ids before it are no longer looked at
        self._read = len(self._ids)  #: ids before it have been given out
        self.pending = True

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._one(i) for i in ids])

    def _one(self, token: int) -> str:
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(before) or text.endswith(_BAD):
            return ""
        self._ids = self._ids[self._read if self._read > self._start else 0 :]
        self._start = 0
        self._read = len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def finish(self) -> str:
        before = self._decode(self._ids[: self._read])
        text = self._decode(self._ids)
        self._read = len(self._ids)
        return text[len(before) :]


class TextStream:
    """A `Detokenizer` (see interface): a stream of text, with stop strings taken out."""

    __slots__ = ("_count", "_matcher", "_stream", "holding", "stopped")

    def __init__(self, stream: _Stream, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._stream = stream
        self._matcher = StopMatcher(stop, include_stop) if any(stop) else None
        self._count = 0
        self.stopped: str | None = None
        self.holding = stream.pending

    def push(self, token_ids: Sequence[int]) -> str:
        if self.stopped is not None or not token_ids:
            return ""
        if self._matcher is not None:
            return self._push_matching(token_ids, self._matcher)
        self._count += len(token_ids)
        text = self._stream.push(token_ids)
        self.holding = self._stream.pending
        return text

    def _push_matching(self, token_ids: Sequence[int], matcher: StopMatcher) -> str:
        out: list[str] = []
        for i in token_ids:
            self._count += 1
            out.append(matcher.feed(self._stream.push((i,))))
            if matcher.stopped is not None:
                self.stopped = matcher.stopped
                break
        self.holding = self.stopped is None and (self._stream.pending or matcher.partial)
        return "".join(out)

    def consumed(self) -> int:
        return self._count

    def finish(self) -> str:
        self.holding = False
        if self.stopped is not None:
            return ""
        text = self._stream.finish()
        if self._matcher is not None:
            text = self._matcher.feed(text)
            self.stopped = self._matcher.stopped
            text += self._matcher.held
            self._matcher.held = ""
        return text


def piece_stream(
    pieces: Pieces, *, special: frozenset[int], skip_special: bool = True, prompt_ids: Sequence[int] = ()
) -> _Stream:
    """A stream over a table of pieces."""
    rest, first = (pieces.rest, pieces.first) if skip_special else (pieces.rest_shown, pieces.first_shown)
    hidden = special if skip_special else frozenset()
    start = None if not pieces.start_differs or any(i not in hidden for i in reversed(prompt_ids)) else first
    held = _open_character(b"".join([rest[i] for i in prompt_ids[-4:]])) if prompt_ids else b""
    if pieces.is_byte is not None:
        return _FallbackStream(rest, start, pieces.is_byte, hidden, held)
    return _ByteStream(rest, start, hidden, held)


def detokenizer(
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    *,
    stop: Sequence[str] = (),
    include_stop: bool = False,
    skip_special: bool = True,
    prompt_ids: Sequence[int] = (),
) -> TextStream:
    """A new generation's detokenizer, with the prompt for context (a leading space, half a character)."""
    stream: _Stream
    if vocabulary.pieces is None:
        stream = _WindowStream(tokenizer, skip_special, prompt_ids)
    else:
        stream = piece_stream(
            vocabulary.pieces, special=vocabulary.special, skip_special=skip_special, prompt_ids=prompt_ids
        )
    return TextStream(stream, stop, include_stop)


def _open_character(data: bytes) -> bytes:
    """The bytes of an incomplete but so far valid character that `data` ends with."""
    for n in range(1, min(3, len(data)) + 1):
        if data[-n] < 0x80:
            break
        if data[-n] >= 0xC0:
            try:
                _, used = codecs.utf_8_decode(data[-n:], "strict", False)
            except UnicodeDecodeError:
                break
            return data[-n:] if used == 0 else b""
    return b""


def _if_continued(held: bytes, data: bytes) -> bytes:
    """`held` if the next byte carries its character on, else nothing."""
    try:
        codecs.utf_8_decode(held + data[:1], "strict", False)
    except UnicodeDecodeError:
        return b""
    return held
