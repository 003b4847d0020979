"""From logits to tokens.

A token is a function of its row of logits, the request's parameters, its seed, and its index: one uniform number is
hashed from (seed, index) and looked up in the cumulative distribution. No generator has a state, so neither the batch
that a request happens to run in, nor a preemption, nor the device changes what it draws.

Order, as in vLLM: logit_bias and penalties, temperature, min_p, top_k, top_p. Log probabilities are those of the model,
before any of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evap.messages import SamplingParams, TokenLogprobs, TopLogprob

#: Below this a temperature is greedy; dividing by it would only make infinities.
_COLD = 1e-5
#: Candidates that filters look at before the whole vocabulary is sorted.
_CANDIDATES = 512
_MASK = (1 << 64) - 1
Decide = Callable[[int, Sequence[int]], int]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), seeded twice over."""
    return (_mix(_mix(seed & _MASK) + (index + 1) * 0x9E3779B97F4A7C15 & _MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


class Row:
    """How one request samples, and what its penalties have counted so far."""

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        prompt: Sequence[int],
        stop_ids: frozenset[int],
        seed: int,
        vocab: int,
        device: torch.device,
    ) -> None:
        self.sampling = sampling
        self.seed = seed
        self.greedy = sampling.temperature < _COLD
        self._vocab = vocab
        self._device = device
        self._prompt = prompt
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        self._counted = 0
        self._bias = self._ids(sampling.logit_bias)
        self._bias_values = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=device)
        self._stop = self._ids(stop_ids)
        self._penal = bool(sampling.presence_penalty or sampling.frequency_penalty)
        self._repeat = sampling.repetition_penalty != 1.0

    def _ids(self, ids: Sequence[int] | frozenset[int] | dict[int, float]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64, device=self._device)

    def adjusts(self, index: int) -> bool:
        """Whether `adjust` would change anything for the token of this index."""
        return self._penal or self._repeat or bool(self.sampling.logit_bias) or index < self.sampling.min_tokens

    def adjust(self, logits: Tensor, output: Sequence[int]) -> None:
        """Apply bias, penalties and min_tokens to one row, float32 (vocab,), in place. output: tokens so far."""
        sampling = self.sampling
        if self._penal or self._repeat:
            counts, seen = self._count(output)
            if self._repeat:
                factor = sampling.repetition_penalty
                changed = torch.where(logits > 0, logits / factor, logits * factor)
                logits.copy_(torch.where(seen, changed, logits))
            logits.sub_(counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty)
        if sampling.logit_bias:
            logits.index_add_(0, self._bias, self._bias_values)
        if len(output) < sampling.min_tokens:
            logits.index_fill_(0, self._stop, -math.inf)

    def _count(self, output: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Occurrences in the output, float32; and what the prompt or the output contains, bool."""
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros(self._vocab, dtype=torch.float32, device=self._device)
            self._seen = torch.zeros(self._vocab, dtype=torch.bool, device=self._device)
            self._seen[self._ids(self._prompt)] = True
        if len(output) > self._counted:
            new = self._ids(output[self._counted :])
            self._counts.index_add_(0, new, torch.ones(len(new), dtype=torch.float32, device=self._device))
            self._seen[new] = True
            self._counted = len(output)
        return self._counts, self._seen


def sample(
    logits: Tensor, rows: Sequence[Row], outputs: Sequence[Sequence[int]], decide: Decide | None = None
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """One token per row of `logits` (rows, vocab), and its log probabilities where asked for.

    outputs: the tokens that each row has generated so far. decide: see `Model.decider`; asked when no row is adjusted.
    """
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    adjusted = [i for i, row in enumerate(rows) if row.adjusts(len(outputs[i]))]
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if not (wanted or adjusted or drawn):
        return _best(logits, decide), [None] * len(rows)
    scores = logits.float()
    raw = torch.log_softmax(scores[wanted], -1) if wanted else None
    if adjusted and scores is logits:
        scores = scores.clone()
    for i in adjusted:
        rows[i].adjust(scores[i], outputs[i])
    tokens = _best(scores, None if adjusted else decide) if len(drawn) < len(rows) else [0] * len(rows)
    if drawn:
        numbers = [uniform(rows[i].seed, len(outputs[i])) for i in drawn]
        for i, token in zip(drawn, _draw(scores[drawn], [rows[i].sampling for i in drawn], numbers), strict=True):
            tokens[i] = token
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    if raw is not None:
        for i, line in zip(wanted, raw, strict=True):
            logprobs[i] = _logprobs(line, tokens[i], rows[i].sampling.logprobs or 0)
    return tokens, logprobs


def _best(scores: Tensor, decide: Decide | None) -> list[int]:
    """The best of each row, and of several that are equal the one that `decide` says, or the first."""
    return [
        decide(row, ids) if decide is not None and len(ids) > 1 else ids[0] for row, ids in enumerate(_maxima(scores))
    ]


def _maxima(scores: Tensor) -> list[list[int]]:
    """Ids of the greatest score of each row, ascending; [0] for a row of NaN.

    In two stages, the maximum of short blocks and then a look into those that hold it: a third less time than `max`,
    an eighth of that of `argmax` (bfloat16 on a CPU), and ties come to light.
    """
    rows, vocab = scores.shape
    width = math.gcd(vocab, 256)
    blocks = scores.view(rows, -1, width if width >= 16 else vocab)
    tops = blocks.amax(-1)
    best = tops.amax(-1, keepdim=True)
    row, block = (tops == best).nonzero(as_tuple=True)
    hit, offset = (blocks[row, block] == best[row]).nonzero(as_tuple=True)
    found: list[list[int]] = [[] for _ in range(rows)]
    for at, token in zip(row[hit].tolist(), (block[hit] * blocks.shape[2] + offset).tolist(), strict=True):
        found[at].append(token)
    return [ids or [0] for ids in found]


def _logprobs(line: Tensor, token: int, count: int) -> TokenLogprobs:
    values, ids = line.topk(count)
    top = tuple(TopLogprob(i, max(v, -9999.0)) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(max(float(line[token]), -9999.0), top)


def _draw(scores: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    """Sample each row of scores (rows, vocab) float32 with temperature and filters; numbers are uniform in [0, 1)."""
    device = scores.device
    scores = scores / torch.tensor([p.temperature for p in params], device=device)[:, None]
    tokens = [0] * len(params)
    whole = [i for i, p in enumerate(params) if p.top_p >= 1 and p.top_k == 0 and p.min_p == 0]
    if whole:
        mass = torch.softmax(scores[whole], -1).cumsum(-1, dtype=torch.float64)
        picked = _pick(mass, mass[:, -1], [numbers[i] for i in whole])
        for i, token in zip(whole, picked.tolist(), strict=True):
            tokens[i] = token
    todo = [i for i in range(len(params)) if i not in whole]
    for width in (_CANDIDATES, scores.shape[-1]):
        if not todo:
            break
        found = _filtered(scores[todo], [params[i] for i in todo], [numbers[i] for i in todo], width)
        for i, token in zip(todo, found, strict=True):
            tokens[i] = token if token is not None else -1
        todo = [i for i in todo if tokens[i] < 0]
    return tokens


def _pick(mass: Tensor, total: Tensor, numbers: Sequence[float]) -> Tensor:
    """First column of each row whose cumulative mass exceeds number * total. float64, so that tails are not lost."""
    target = torch.tensor(numbers, dtype=torch.float64, device=mass.device) * total
    return torch.searchsorted(mass, target[:, None], right=True)[:, 0].clamp_(max=mass.shape[1] - 1)


def _filtered(
    lines: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float], width: int
) -> list[int | None]:
    """Sample rows of tempered scores from their `width` best; None for a row whose filters need more than that.

    Sorted downwards, every filter keeps a beginning of the row, so all of them come to one length per row. Whether a
    row needs more is decided by that row alone, or the batch would matter where scores tie.
    """
    device, vocab = lines.device, lines.shape[-1]
    width = min(width, vocab)
    values, ids = lines.sort(dim=-1, descending=True, stable=True) if width == vocab else lines.topk(width)

    def column(numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=device)[:, None]

    top_k = column([p.top_k or vocab for p in params])
    min_p = column([p.min_p for p in params])
    top_p = column([p.top_p for p in params])
    chance = torch.exp(values.double() - torch.logsumexp(lines.double(), -1, keepdim=True))
    kept = (torch.arange(width, device=device) < top_k) & (chance >= min_p * chance[:, :1])
    chance = chance * kept
    mass = chance.cumsum(-1)
    # top_p is a share of what top_k and min_p keep: known if they cut within the width, or do not cut at all.
    cut = kept.sum(-1, keepdim=True) < width
    total = torch.where(cut | (width == vocab), mass[:, -1:], 1.0)
    # A token is in the nucleus if what precedes it does not reach top_p; the first always is.
    nucleus = (mass - chance < top_p * total) & kept
    length = nucleus.sum(-1, keepdim=True).clamp_(min=1)
    unlimited = (top_k >= vocab) & (min_p == 0)
    known = (cut | unlimited) & (length < width) | (width == vocab)
    rest = mass.gather(1, length - 1)[:, 0]
    places = torch.minimum(_pick(mass, rest, numbers)[:, None], length - 1)
    found = ids.gather(1, places)[:, 0].tolist()
    return [token if ok else None for token, ok in zip(found, known[:, 0].tolist(), strict=True)]
