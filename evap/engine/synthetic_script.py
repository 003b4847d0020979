"""What a synthetic generation says: a run through one of three cyclic texts, and where it ends.

PLAIN from a sentence that the prompt and the seed choose; HARD when the prompt has the token `babel:`; and, when the
prompt has `canary:word` (the last one counts), the word over and over, so that every stream can be told by its text.
Of a very long prompt only the end is looked at.
"""

from __future__ import annotations

import math
import re
from array import array
from typing import Final, TypeAlias
from zlib import crc32

import numpy as np

from evap.engine.synthetic_text import BABEL, CANARY, EOS, FIRST_SPECIAL, HARD, PLAIN, VOCABULARY, encode_bytes
from evap.messages import (
    HAS_LOGPROBS,
    SILENT,
    Finish,
    GenerateRequest,
    SamplingParams,
    TokenBatch,
    TokenLogprobs,
    TopLogprob,
    id_list,
)

#: Ids of a prompt that matter, from its end: looking through millions would hold up everybody.
LOOKED_AT: Final = 1 << 16
CANARY_TOKENS: Final = 64
_WORD: Final = re.compile(rb"[\w\x80-\xff-]+")
_PLAIN_STARTS, _HARD_STARTS = ([0, *(i + 1 for i, t in enumerate(s[:-1]) if t == ord("."))] for s in (PLAIN, HARD))

#: base, stop and cursor of a text in the arena; or count, last token (-1: the text's own) and flags of an ending.
Three: TypeAlias = tuple[int, int, int]


class Script:
    """The arena holds PLAIN, HARD, then a region for each of `max_running` canaries."""

    def __init__(self, max_running: int) -> None:
        self._canaries = len(PLAIN) + len(HARD)
        self.arena = np.zeros(self._canaries + max_running * CANARY_TOKENS, np.int32)
        self.arena[: self._canaries] = PLAIN + HARD
        self._regions = list(range(max_running))

    def text(self, request: GenerateRequest) -> tuple[Three, int]:
        """base, stop and first cursor of its text in the arena; the canary region it took, to be released, or -1."""
        ids, seed = id_list(request.prompt_ids[-LOOKED_AT:]), request.sampling.seed or 0
        word = _word_after(ids, len(ids) - ids[::-1].index(CANARY)) if CANARY in ids else []
        if word:
            region = self._regions.pop()
            base = self._canaries + region * CANARY_TOKENS
            self.arena[base : base + len(word)] = word
            return (base, base + len(word), base), region
        base, length, starts = (len(PLAIN), len(HARD), _HARD_STARTS) if BABEL in ids else (0, len(PLAIN), _PLAIN_STARTS)
        choice = crc32(array("i", ids).tobytes(), seed & 0xFFFF_FFFF) % len(starts)
        return (base, base + length, base + starts[choice]), -1

    def release(self, region: int) -> None:
        if region >= 0:
            self._regions.append(region)

    def plan(self, sampling: SamplingParams, text: Three, natural: int, room: int) -> Three:
        """How many tokens; the last one's id, or -1 for the text's own; its flags. EOS follows `natural` tokens."""
        count = min(sampling.max_tokens or room, room)
        natural = max(natural, sampling.min_tokens)
        plan: Three = (count, -1, int(Finish.LENGTH))
        if not sampling.ignore_eos and natural < count:
            plan = (natural + 1, EOS, Finish.STOP | SILENT)
        if sampling.stop_token_ids:
            base, stop, cursor = text
            texts = plan[0] - (plan[1] >= 0)
            said = np.arange(sampling.min_tokens, min(sampling.min_tokens + stop - base, texts))
            tokens = self.arena[base + (cursor - base + said) % (stop - base)]
            hits = np.flatnonzero(np.isin(tokens, sampling.stop_token_ids))
            if hits.size:
                plan = (int(said[hits[0]]) + 1, -1, Finish.STOP | SILENT)
        return plan


def _word_after(ids: list[int], at: int) -> list[int]:
    """The word that starts at `at`, and a space, as at most CANARY_TOKENS ids; empty if there is none."""
    text = b"".join([VOCABULARY[i] if i < FIRST_SPECIAL else b" " for i in ids[at : at + CANARY_TOKENS]])
    word = _WORD.match(text)
    return encode_bytes(word.group()[: CANARY_TOKENS - 1] + b" ") if word else []


def score(batch: TokenBatch, wanted: dict[int, int]) -> None:
    """Give records made-up log probabilities; wanted: record number -> alternatives.

    A function of the token: it is the likeliest, and from its neighbours on the probability halves.
    """
    batch.flags = batch.flags.copy()
    scores: dict[int, TokenLogprobs] = {}
    for row, k in wanted.items():
        token = int(batch.token[row])
        p = 0.5 + token % 100 / 250
        odds = [(token, p), *(((token + j) % len(VOCABULARY), (1 - p) / 2**j) for j in range(1, k))]
        scores[row] = TokenLogprobs(math.log(p), tuple(TopLogprob(i, math.log(q)) for i, q in odds[:k]))
        batch.flags[row] |= HAS_LOGPROBS
    batch.logprobs = scores
