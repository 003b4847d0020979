"""The synthetic engine's language: a byte-level vocabulary, two endless texts, and a `Text` around them.

PLAIN is what a model mostly writes: words, punctuation, complete characters, each token short. HARD is what breaks
servers: characters split across tokens, emoji joined by ZWJ, quotes, backslashes, control characters, long tokens.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from evap.engine.detokenizer import TextStream, piece_stream
from evap.engine.interface import Detokenizer, Fragments
from evap.engine.vocabulary import Pieces
from evap.errors import InvalidRequest, echo

#: A sentence is its tokens' bytes, parted by `|`.
_PLAIN: Final = (
    "The| quick| brown| fox| jumps| over| the| lazy| dog|,| and| then| it| rests|.",
    " A| server| that| speaks| with| many| clients| at| once| must| keep| each| answer| apart| from| the| others|.",
    " Every| token| counts|:| one| record|,| one| row|,| one| frame|.",
    ' She| said|,| "|Hello|,| world|!|"| and| wrote| the| word| down| on| a| sheet| of| paper|.',
    "\n|\n|First|,| measure| what| is| there|;| second|,| change| one| thing|;| third|,| measure| again|.",
    " The| caf\u00e9| in| Z\u00fcrich| opens| at| 8|:|30|,| and| closes| at| 17|:|45|.",
    " \u4f60\u597d|\uff0c|\u4e16\u754c|\u3002",
    " \u041f\u0440\u0438\u0432\u0435\u0442|,| \u043c\u0438\u0440|!",
    " It| works| \U0001f600|,| most| of| the| time|.",
    '\n|```|python|\n|print|(|"|x| =|",| x|)|\n|```|\n',
    " Numbers| such| as| 3|.|14|15|9| and| paths| such| as| C|:|\\|temp| are| tokens| too|.",
    " When| a| reader| is| slow|,| the| writer| waits| for| nobody| else|'s| sake|.",
    " In| the| end| there| is| only| the| sum| of| small| steps|,| taken| one| after| the| other|.",
)
_HARD: Final = (
    b"Split| smile|: |\xf0\x9f|\x98|\x80|, |\xf0|\x9f\x98\x80|, |\xf0\x9f\x98|\x80|.",
    b" Family|: |\xf0\x9f\x91\xa8\xe2\x80\x8d|\xf0\x9f\x91\xa9|\xe2\x80|\x8d\xf0\x9f\x91|\xa7\xe2\x80\x8d|"
    b"\xf0\x9f\x91\xa6|.",
    " Whole| family|: |\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466|.".encode(),
    b" Flag|: |\xf0\x9f\x87\xa9|\xf0\x9f\x87\xaa|, skin|: |\xf0\x9f\x91\x8d|\xf0\x9f\x8f\xbd|.",
    b" Accent|: e|\xcc\x81|, e|\xcc|\x81|.",
    b' Quotes|: |"|"""|\\|\\\\|\\"|\\n|\\u0041|.',
    b"\n|\r\n|\t|\x00|\x01|\x1b[0m|\x7f|\x0b|\x0c|\x08|.",
    b" Lines|: |\xe2\x80\xa8|\xe2\x80\xa9|\xc2\x85|\xef\xbb\xbf|.",
    b" Long|:| antidisestablishmentarianism|, |" + b'"' * 16 + b"|, |" + b"-" * 40 + b"|, |" + b" " * 32 + b"|.",
    b" </script>|<!--|&amp;|data: |[DONE]|\n\n|event: |: |.",
    b" \xe4\xbd|\xa0|\xe5|\xa5|\xbd|\xef\xbc\x8c|\xe4\xb8\x96\xe7|\x95\x8c|.",
    b" Edge|: |\xed\x9f\xbf|\xee\x80\x80|\xef\xbf\xbf|\xf4\x8f\xbf\xbf|\xef\xbf\xbd|.",
)
#: After this token the prompt names a word that the answer repeats: each stream then carries its own text.
CANARY_TEXT: Final = b"canary:"
#: A prompt with this token is answered in HARD.
BABEL_TEXT: Final = b"babel:"
_SPECIAL: Final = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|eos|>")
_ROLES: Final = {"system": 0, "developer": 0, "user": 1, "assistant": 2, "tool": 3, "function": 3}


def _build() -> tuple[list[bytes], list[int], list[int]]:
    """The vocabulary without specials, and the two texts as ids."""
    texts = [[s.encode().split(b"|") for s in _PLAIN], [s.split(b"|") for s in _HARD]]
    ids = {bytes([b]): b for b in range(256)}
    for piece in (CANARY_TEXT, BABEL_TEXT, *(p for text in texts for sentence in text for p in sentence)):
        ids.setdefault(piece, len(ids))
    plain, hard = ([ids[p] for sentence in text for p in sentence] for text in texts)
    return list(ids), plain, hard


_PIECES, PLAIN, HARD = _build()
_IDS: Final = {piece: i for i, piece in enumerate(_PIECES)}
FIRST_SPECIAL: Final = len(_PIECES)
VOCABULARY: Final[tuple[bytes, ...]] = (*_PIECES, *(s.encode() for s in _SPECIAL))
EOS: Final = VOCABULARY.index(b"<|eos|>")
END: Final = VOCABULARY.index(b"<|end|>")
_HIDDEN: Final = frozenset(range(FIRST_SPECIAL, len(VOCABULARY)))
_SKIPPED: Final = [*_PIECES, *[b""] * len(_SPECIAL)]
_SHOWN: Final = list(VOCABULARY)
_TABLE: Final = Pieces(rest=_SKIPPED, first=_SKIPPED, rest_shown=_SHOWN, first_shown=_SHOWN, is_byte=None)
CANARY: Final = _IDS[CANARY_TEXT]
BABEL: Final = _IDS[BABEL_TEXT]
_WORDS: Final = re.compile(rb"canary:|babel:| (?!canary:|babel:)[A-Za-z]+|[A-Za-z]+|.", re.DOTALL)


def encode_bytes(data: bytes) -> list[int]:
    """Ids whose bytes, joined, are `data`: known words are one token, all else is one token a byte."""
    ids: list[int] = []
    known = _IDS.get
    for match in _WORDS.finditer(
        data
    ):  # not findall: one call over 30 MB would hold the GIL, and the loop, for a second
        piece = match[0]
        i = known(piece)
        if i is None:
            ids.extend(piece)
        else:
            ids.append(i)
    return ids


class _Fragments:
    """`Fragments` as plain data."""

    def __init__(self, width: int, text: npt.NDArray[np.void], fast: npt.NDArray[np.bool_]) -> None:
        self.width, self.text, self.fast = width, text, fast


def fragment_table(vocabulary: Sequence[bytes], special: frozenset[int], width: int = 24) -> _Fragments:
    """Fast: complete characters whose escaped text and closing quote fit the field. Contexts do not matter here."""
    fields, fast = [], np.zeros(len(vocabulary), np.bool_)
    for i, data in enumerate(vocabulary):
        escaped = b""
        if i not in special:
            with contextlib.suppress(UnicodeDecodeError):
                escaped = msgspec.json.encode(data.decode())[1:]
        fast[i] = 0 < len(escaped) <= width
        fields.append((escaped if fast[i] else b'"').ljust(width))
    return _Fragments(width, np.frombuffer(b"".join(fields), f"V{width}"), fast)


def _content(message: Mapping[str, object]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    texts = []
    for part in content if isinstance(content, Sequence) else ():
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise InvalidRequest("the synthetic engine reads text parts only", param="messages")
        texts.append(text)
    return "".join(texts)


class SyntheticText:
    """`Text` of the synthetic engine. The specials come from the chat template only, never from text."""

    vocab_size: int = len(VOCABULARY)
    eos_ids: frozenset[int] = frozenset({EOS})
    limit_tokens: int = 0  # bytes are tokens here: nothing is gained by looking early
    fragments: Fragments | None = fragment_table(VOCABULARY, _HIDDEN)

    def encode(self, text: str) -> list[int]:
        return encode_bytes(text.encode("utf-8", "replace"))

    def chat_ids(self, messages: Sequence[object], template_args: dict[str, object]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            role = message.get("role") if isinstance(message, Mapping) else None
            if not isinstance(message, Mapping) or role not in _ROLES:
                raise InvalidRequest(f"the chat template knows no role {echo(role)}", param="messages")
            ids.append(FIRST_SPECIAL + _ROLES[role])
            ids += self.encode(_content(message))
            ids.append(END)
        if template_args.get("add_generation_prompt", True):
            ids.append(FIRST_SPECIAL + _ROLES["assistant"])
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        limit = FIRST_SPECIAL if skip_special else len(VOCABULARY)
        return b"".join([VOCABULARY[i] for i in ids if i < limit]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return VOCABULARY[token_id]

    def detokenizer(
        self,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> Detokenizer:
        stream = piece_stream(_TABLE, special=_HIDDEN, skip_special=skip_special, prompt_ids=prompt_ids[-4:])
        return TextStream(stream, stop, include_stop)
