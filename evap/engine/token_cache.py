"""Token ids of texts seen before, piece by piece: a conversation sent again costs its new part.

Added tokens that are matched in the raw text split it before normalizer, pre-tokenizer and model see it, so the text
between two of them always gives the same ids. Long stretches are cut further, where the pre-tokenizer is known to cut
anyway. Pieces are looked up by their exact text (never by a digest: one key's text must not become another's).
Where a piece depends on more than what it is looked up by, nothing is cached and the whole text is encoded.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from evap.errors import ContextOverflow, InvalidRequest

#: Characters of a piece before a cut is looked for: long enough to make look-ups few, short enough to find them again.
_PIECE: Final = 4096
#: Characters that one regular-expression call may look at: it holds the interpreter lock meanwhile.
_WINDOW: Final = 1 << 18
#: Texts that are encoded in one call: enough for many cores, few enough that freeing the results is short.
_BATCH: Final = 64
_ENTRY_OVERHEAD: Final = 150
Ids = tuple[int, ...]

#: Letters that every pre-tokenizer below takes for letters: ASCII, kana, CJK, Hangul.
_LETTER: Final = "A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
#: A letter before " x", or a visible character and a line end before a letter. In each pattern below, and in GPT-2's,
#: no match goes across either place, and what is left of it matches alike at the end of a text.
_CUT: Final = re.compile(f"[{_LETTER}](?= [{_LETTER}])|[!-~{_LETTER}]\n(?=[{_LETTER}])")

_CONTRACTION: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
#: Split patterns of tokenizer.json for which `_CUT` is exact: Llama 3, Qwen 2 and 3, GPT-4o.
_KNOWN_SPLITS: Final = frozenset(
    {
        _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _ENDS,
        _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _ENDS,
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _ENDS,
    }
)
#: Pre-tokenizers that treat a stretch alike wherever it stands in the text.
_ANYWHERE: Final = frozenset(
    {
        "ByteLevel",
        "Digits",
        "Split",
        "Whitespace",
        "WhitespaceSplit",
        "Punctuation",
        "BertPreTokenizer",
        "UnicodeScripts",
        "CharDelimiterSplit",
    }
)


class Splitter:
    """How a tokenizer's texts may be taken apart. `why` is not empty when they may not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        spec = _spec(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        literal = [t for t in added.values() if not t.normalized and t.content]
        self._ids = {t.content: (i,) for i, t in added.items() if not t.normalized and t.content}
        self._odd = frozenset(t.content for t in literal if t.lstrip or t.single_word)
        self._longest = max((len(t.content) for t in literal), default=0)
        self._pattern = _alternatives(literal)
        steps = _steps(spec["pre_tokenizer"])
        anywhere = all(s["type"] in _ANYWHERE or _is_steady(s) for s in steps)
        #: Tokens after which a piece is encoded together with them: they eat white space, or position matters.
        self.leads = tuple(t.content for t in literal if t.rstrip or not anywhere)
        #: Added tokens that are looked for later, inside the pieces: a cut must not come into or beside one.
        inner = [t for t in added.values() if t.normalized]
        clear = not any(t.lstrip or t.rstrip or t.single_word or len(t.content.split()) != 1 for t in inner)
        self._cuts = anywhere and clear and _may_cut(spec["normalizer"], steps)
        self.why = "its model drops merges at random" if getattr(tokenizer.model, "dropout", None) else ""

    def split(self, text: str) -> list[str | Ids] | None:
        """Pieces to encode and ids, in order, or None when this text must be encoded as a whole. A piece that starts
        with one of `leads` is encoded with that token, whose id is then dropped."""
        if self.why:
            return None
        parts: list[str | Ids] = []
        start, lead = 0, ""
        for found in self._tokens(text):
            token = found.group()
            if token in self._odd:
                return None
            begin = found.start()
            if begin > start:
                self._cut(text, start, begin, lead, parts)
            parts.append(self._ids[token])
            start, lead = found.end(), token
        if start < len(text):
            self._cut(text, start, len(text), lead, parts)
        return parts

    def _tokens(self, text: str) -> Iterator[re.Match[str]]:
        """Added tokens from left to right, the longest at each place, as tokenizers' Aho-Corasick finds them."""
        if self._pattern is None:
            return
        at = 0
        while at < len(text):
            bound = at + _WINDOW
            at = bound
            for found in self._pattern.finditer(text, bound - _WINDOW, bound + self._longest):
                if found.start() >= bound:
                    break
                at = max(at, found.end())
                yield found

    def _cut(self, text: str, start: int, stop: int, lead: str, parts: list[str | Ids]) -> None:
        """Append text[start:stop], which comes after the added token `lead`, in one or more pieces."""
        head = lead if lead in self.leads else ""
        while start < stop:
            end = _next_cut(text, start + _PIECE, stop) if self._cuts and stop - start >= 2 * _PIECE else stop
            parts.append(head + text[start:end])
            start, head = end, ""


def _next_cut(text: str, at: int, stop: int) -> int:
    while at < stop - _PIECE:
        found = _CUT.search(text, at, min(at + _WINDOW, stop))
        if found is not None:
            return found.end()
        at += _WINDOW - 2  # a cut may lie across the end of the window
    return stop


def _alternatives(tokens: Sequence[AddedToken]) -> re.Pattern[str] | None:
    texts = sorted((t.content for t in tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _spec(tokenizer: Tokenizer) -> dict[str, Any]:
    parts = {"normalizer": tokenizer.normalizer, "pre_tokenizer": tokenizer.pre_tokenizer}
    return {k: None if v is None else json.loads(v.__getstate__()) for k, v in parts.items()}


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [s for p in pre_tokenizer["pretokenizers"] for s in _steps(p)]
    return [pre_tokenizer]


def _is_steady(step: dict[str, Any]) -> bool:
    return step["type"] == "Metaspace" and step.get("prepend_scheme") in ("always", "never")


def _may_cut(normalizer: dict[str, Any] | None, steps: list[dict[str, Any]]) -> bool:
    """NFC does not reach across a cut (a space, or a line end, composes with nothing)."""
    if not steps or (normalizer is not None and normalizer["type"] != "NFC"):
        return False
    *before, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    if last.get("use_regex", True):
        return all(s["type"] == "Digits" for s in before)
    return bool(before) and all(
        s["type"] == "Split"
        and s["behavior"] == "Isolated"
        and not s["invert"]
        and s["pattern"].get("Regex") in _KNOWN_SPLITS
        for s in before
    )


class TokenCache:
    """Ids of texts, without special tokens around them; always those of the plain tokenizer. Thread-safe.

    max_bytes bounds the memory of what is remembered (least recently used goes first); 0 remembers nothing.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._splitter = Splitter(tokenizer)
        self._max_bytes = max_bytes
        self._bytes = 0
        #: Tuples of shared ints: 8 bytes per token, and nothing for the garbage collector to walk through.
        self._known: OrderedDict[str, Ids] = OrderedDict()
        self._lock = threading.Lock()
        self._ints = list(range(max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1))

    @property
    def why_off(self) -> str:
        """Why nothing can be cached for this tokenizer, or ""."""
        return self._splitter.why

    @property
    def used_bytes(self) -> int:
        return self._bytes

    def ids(self, text: str, limit: int = 0, param: str = "prompt") -> list[int]:
        """Ids of `text`. Raises ContextOverflow (of `param`) as soon as there are more than `limit` (0: no limit),
        and InvalidRequest for a text that is not Unicode (a lone surrogate)."""
        parts = self._splitter.split(text)
        out: list[int] = []
        if parts is None:
            out += self._encode([text])[0]
        else:
            found = self._look_up(parts)
            fresh = self._encode_missing(parts, found, limit, param) if None in found else {}
            for part, ids in zip(parts, found, strict=True):
                out += fresh[part] if ids is None else ids  # type: ignore[index]  # what is not found is a str
        _check(len(out), limit, param)
        return out

    def _look_up(self, parts: Sequence[str | Ids]) -> list[Ids | None]:
        found: list[Ids | None] = []
        with self._lock:
            get, touch = self._known.get, self._known.move_to_end
            for part in parts:
                if isinstance(part, tuple):
                    found.append(part)
                    continue
                ids = get(part)
                if ids is not None:
                    touch(part)
                found.append(ids)
        return found

    def _encode_missing(
        self, parts: Sequence[str | Ids], found: Sequence[Ids | None], limit: int, param: str
    ) -> dict[str, Ids]:
        pairs = zip(parts, found, strict=True)
        missing = list(dict.fromkeys(p for p, ids in pairs if ids is None and isinstance(p, str)))
        count = sum(len(ids) for ids in found if ids is not None)
        fresh: dict[str, Ids] = {}
        for i in range(0, len(missing), _BATCH):
            batch = missing[i : i + _BATCH]
            for text, ids in zip(batch, self._encode(batch), strict=True):
                fresh[text] = ids[1:] if self._splitter.leads and text.startswith(self._splitter.leads) else ids
                count += len(fresh[text])
            self._store(batch, fresh)
            _check(count, limit, param)
        return fresh

    def _encode(self, texts: list[str]) -> list[Ids]:
        """One call for all texts: encode() of one keeps the interpreter lock, the batch call does not."""
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (UnicodeError, TypeError) as e:
            raise InvalidRequest("the prompt is not valid Unicode text", param="prompt") from e
        shared: Callable[[int], int] = self._ints.__getitem__
        return [tuple(map(shared, e.ids)) for e in encodings]

    def _store(self, texts: Sequence[str], ids: dict[str, Ids]) -> None:
        with self._lock:
            for text in texts:
                size = _size(text, ids[text])
                if text in self._known or size > self._max_bytes // 4:
                    continue
                self._known[text] = ids[text]
                self._bytes += size
            while self._bytes > self._max_bytes:
                old, old_ids = self._known.popitem(last=False)
                self._bytes -= _size(old, old_ids)


def _size(text: str, ids: Ids) -> int:
    return sys.getsizeof(text) + sys.getsizeof(ids) + _ENTRY_OVERHEAD


def _check(count: int, limit: int, param: str) -> None:
    if limit and count > limit:
        raise ContextOverflow(
            f"the prompt has at least {count} tokens; the model's context has room for {limit}", param=param
        )
