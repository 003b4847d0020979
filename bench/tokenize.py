"""CPU of turning a conversation into token ids: seen for the first time, and sent again with one new turn.

    python -m bench.tokenize --quick --json -        up to 16,000 tokens, a few seconds
    python -m bench.tokenize --json out.json         up to 200,000 tokens

cold: nothing is known. resent: the same conversation with an answer and a question more, as a client that keeps no
session sends it. plain: what a server without a cache does for it (render, and the tokenizers library's encode).
Times are CPU of all threads (batches are encoded on several cores); `*_wall_ms` is elapsed time. Every id list is
compared with the plain tokenizer's. The text is Python's own language reference.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer

from bench.measure import Spread, emit, machine, say, versions
from evap.engine.chat_template import load_chat_template
from evap.engine.model import resolve
from evap.engine.tokenizer import HfText, load_text

SIZES = (1_000, 4_000, 16_000, 64_000, 200_000)
QUICK = SIZES[:3]
#: Turns that are added one by one, each with the whole conversation sent again.
RESENT = 4
Message = dict[str, Any]


class Talk:
    """Turns of a conversation: a question of about 40 tokens, an answer of about 300."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._paragraphs = [p for text in topics.values() for p in text.split("\n\n") if len(p) > 80]

    def turn(self) -> list[Message]:
        question = self._random.choice(self._paragraphs)[:160]
        answer = "\n\n".join(self._random.choices(self._paragraphs, k=4))[:1200]
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def of_tokens(self, count: int, text: HfText) -> list[Message]:
        messages: list[Message] = []
        seen = 0
        while seen < count:
            turn = self.turn()
            messages += turn
            seen += len(text.chat_ids(turn, {}))
        return messages


def measure(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """(CPU ms of all threads, elapsed ms, result)"""
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3, result


def row(path: Path, tokens: int, repeat: int) -> dict[str, Any]:
    scratch = load_text(path, cache_mb=0)
    template = load_chat_template(path)
    library = Tokenizer.from_file(str(path / "tokenizer.json"))

    def plain(messages: list[Message]) -> list[int]:
        return list(library.encode(template.render(messages, {}), add_special_tokens=False).ids)

    figures: dict[str, list[float]] = {}

    def note(name: str, cpu: float, wall: float) -> None:
        figures.setdefault(f"{name}_cpu_ms", []).append(cpu)
        figures.setdefault(f"{name}_wall_ms", []).append(wall)

    count = 0
    for seed in range(repeat):
        talk = Talk(seed)
        messages = talk.of_tokens(tokens, scratch)
        text = load_text(path)
        for name in ("cold", *["resent"] * RESENT):
            cpu, wall, ids = measure(lambda: text.chat_ids(messages, {}))  # noqa: B023  (called here and now)
            note(name, cpu, wall)
            cpu, wall, expected = measure(lambda: plain(messages))  # noqa: B023
            note("plain", cpu, wall)
            if ids != expected:
                raise RuntimeError(f"{name}: other ids than the plain tokenizer's")
            count = len(ids)
            messages = messages + talk.turn()
        note("render", *measure(lambda: template.render(messages, {}))[:2])  # noqa: B023
    result: dict[str, Any] = {"tokens": count}
    for name, values in figures.items():
        Spread.of(values).into(result, name)
    result["resent_over_cold"] = round(result["resent_cpu_ms"] / result["cold_cpu_ms"], 4)
    result["resent_over_plain"] = round(result["resent_cpu_ms"] / result["plain_cpu_ms"], 4)
    return result


def per_call_us(work: Callable[[], Any], calls: int, repeat: int) -> Spread:
    for _ in range(calls // 10):
        work()
    return Spread.of([measure(lambda: [work() for _ in range(calls)])[0] * 1e3 / calls for _ in range(repeat)])


def small(path: Path, repeat: int) -> dict[str, Any]:
    """Costs that every request and every slow token has."""
    text = load_text(path)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = text.encode("\n\n".join(topics.values())[:40_000])
    result: dict[str, Any] = {}
    per_call_us(lambda: text.chat_ids(chat, {}), 2000, repeat).into(result, "one_message_chat_us")

    def detokenize() -> None:
        stream = text.detokenizer()
        for i in ids:
            stream.push((i,))

    Spread.of([measure(detokenize)[0] * 1e3 / len(ids) for _ in range(repeat)]).into(result, "detokenizer_us_per_token")
    start = Spread.of([measure(lambda: load_text(path))[0] for _ in range(repeat)])
    start.into(result, "load_and_verify_ms", 0)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short conversations only")
    parser.add_argument("--json", metavar="FILE", default="-", help="where the document goes; - is stdout")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions, each with another conversation")
    parser.add_argument("--model", default="", help="directory, hub id or built-in name; default: the built-in one")
    args = parser.parse_args()
    local = resolve(args.model)
    document: dict[str, Any] = {
        "bench": "tokenize",
        "model": local.name,
        "machine": machine(),
        "versions": versions("tokenizers", "jinja2"),
    }
    document["small"] = small(local.path, args.repeat)
    document["rows"] = []
    for tokens in QUICK if args.quick else SIZES:
        document["rows"].append(found := row(local.path, tokens, args.repeat))
        say(
            f"{found['tokens']:>7} tokens: cold {found['cold_cpu_ms']:.1f} ms, resent {found['resent_cpu_ms']:.1f} ms,"
            f" {100 * found['resent_over_cold']:.1f} % of cold"
        )
    emit(document, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
