"""What a synthetic generation says and where it ends."""

from __future__ import annotations

import pytest

from evap.messages import HAS_LOGPROBS, SILENT, Finish
from tests.engine.synthetic_bench import TEXT, Bench, one


def test_a_stop_token_ends_it_unless_min_tokens_forbids() -> None:
    said = one(max_tokens=60, ignore_eos=True).tokens()
    stop = said[9]
    first = said.index(stop)
    bench = one(max_tokens=60, stop_token_ids=(stop, 3))
    assert bench.tokens() == said[: first + 1]
    assert bench.records[0, 0][-1][2] == SILENT | Finish.STOP
    later = one(max_tokens=60, stop_token_ids=(said[0],), min_tokens=1).tokens()
    assert len(later) > 1
    assert later[0] == said[0]


def test_prompt_and_seed_decide_what_is_said() -> None:
    texts = {(p, s): one(p, max_tokens=8, seed=s).text() for p in ("a", "b", "c") for s in range(6)}
    assert len(set(texts.values())) > 5
    assert all(one(p, max_tokens=8, seed=s).text() == text for (p, s), text in list(texts.items())[:4])


@pytest.mark.parametrize("word", ["k7", "Zürich-9", "x" * 60, "日本語"])
def test_a_canary_is_repeated(word: str) -> None:
    assert one(f"say canary:{word}. now", max_tokens=200, ignore_eos=True).text().startswith(f"{word} {word} ")


def test_babel_is_hard_and_whole() -> None:
    text = one("babel:", max_tokens=400, ignore_eos=True, seed=1).text()
    for thing in ("\U0001f600", "\u200d", "\x00", '"""', "\\", "\r\n", "\u2028", "e\u0301", "antidis"):
        assert thing in text
    parts = [TEXT.token_bytes(t) for t in one("babel:", max_tokens=400, ignore_eos=True, seed=1).tokens()]
    assert any(len(p) > 24 for p in parts)
    assert b"".join(parts).decode() == text  # valid UTF-8 though many parts are not


def test_logprobs_are_consistent() -> None:
    bench = Bench()
    bench.submit(slot=1, max_tokens=4)
    bench.submit(slot=2, max_tokens=4, logprobs=3)
    bench.submit(slot=3, max_tokens=4, logprobs=0)
    bench.run()
    for batch in bench.batches:
        scored = {i for i, flags in enumerate(batch.flags.tolist()) if flags & HAS_LOGPROBS}
        assert scored == set(batch.logprobs)
        for i, entry in batch.logprobs.items():
            assert len(entry.top) == (3 if batch.slot[i] == 2 else 0)
            values = [t.logprob for t in entry.top]
            assert values == sorted(values, reverse=True)
            assert entry.logprob <= 0
            assert not entry.top or (entry.top[0].token, entry.top[0].logprob) == (batch.token[i], entry.logprob)
