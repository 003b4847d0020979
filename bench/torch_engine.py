"""The embedded engine beside Hugging Face's generate and vLLM's CPU build: tokens per second of 1, 4 and 16 streams.

    python -m bench.torch_engine --quick --json -        two minutes
    python -m bench.torch_engine --json out.json         more repetitions, and float32 as well

All are loaded at once and take turns; median, least and greatest of the repetitions. Prompts are 32 random ids, new
ones every time, so that no prefix cache helps; the time is from the submission to the last token, the prefill included.
evap runs as it is served: in a process of its own, through ring and doorbell. All processes get the same environment:
OpenMP threads spin for a short time only (see evap/engine/supervisor.py), or the idle threads of one engine would
disturb the next.
vLLM takes part if there is a `.venv-vllm` (or `--vllm-python`), transformers if it is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import ROOT, Spread, emit, machine, say, versions
from evap.config import EngineConfig
from evap.engine.model import resolve
from evap.engine.supervisor import TorchReplica
from evap.messages import FINISH_MASK, GenerateRequest, SamplingParams, TokenBatch

PROMPT_TOKENS = 32
STREAMS = (1, 4, 16)
#: What each peer is asked for: transformers has no continuous batching to show.
PEERS = {"evap": STREAMS, "hf": (1,), "vllm": (1, 16)}
ENV = {
    "GOMP_SPINCOUNT": "2000", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
}  # fmt: skip
#: (prompts, tokens of each) -> seconds
Run = Callable[[list[list[int]], int], Awaitable[float]]


class Evap:
    """TorchReplica, used as the server uses it."""

    def __init__(self, model: Path, dtype: str) -> None:
        self._replica = TorchReplica(EngineConfig(dtype=dtype, max_running=64, kv_cache_mb=512), model)
        self._replica.listen(self._batch, lambda state, line: None)
        self._left = 0
        self._done = asyncio.Event()
        self._generation = 0

    async def start(self) -> None:
        await self._replica.start()

    async def stop(self) -> None:
        await self._replica.stop()

    def _batch(self, batch: TokenBatch) -> None:
        self._left -= int(np.count_nonzero(batch.flags & FINISH_MASK))
        if self._left == 0:
            self._done.set()

    async def run(self, prompts: list[list[int]], tokens: int) -> float:
        self._generation += 1
        self._left = len(prompts)
        self._done.clear()
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        for slot, prompt in enumerate(prompts):
            self._replica.submit(slot, self._generation, GenerateRequest(prompt_ids=prompt, sampling=sampling))
        await self._done.wait()
        return time.perf_counter() - begin


class Peer:
    """`offline_generate.py` in its interpreter."""

    def __init__(self, kind: str, python: str, model: Path, dtype: str) -> None:
        script = str(ROOT / "bench" / "peers" / "offline_generate.py")
        self._log = ROOT / "bench" / "out" / f"{kind}-{dtype}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, script, kind, str(model), dtype], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, env={**os.environ, **ENV},
            )  # fmt: skip

    async def start(self) -> None:
        await asyncio.to_thread(self._line)

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        self._process.wait()

    async def run(self, prompts: list[list[int]], tokens: int) -> float:
        return await asyncio.to_thread(self._ask, prompts, tokens)

    def _ask(self, prompts: list[list[int]], tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._line())
        assert answer["tokens"] == len(prompts) * tokens
        return float(answer["seconds"])

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a peer ended; see {self._log}:\n{self._log.read_text(errors='replace')[-2000:]}")
        return line


def peers(options: argparse.Namespace, model: Path, dtype: str) -> tuple[dict[str, Evap | Peer], dict[str, str]]:
    """Who takes part, and who does not and why."""
    found: dict[str, Evap | Peer] = {"evap": Evap(model, dtype)}
    skipped: dict[str, str] = {}
    if versions("transformers"):
        found["hf"] = Peer("hf", sys.executable, model, dtype)
    else:
        skipped["hf"] = "transformers is not installed"
    python = Path(options.vllm_python)
    if python.exists():
        found["vllm"] = Peer("vllm", str(python), model, dtype)
    else:
        skipped["vllm"] = f"no {python}"
    return found, skipped


async def measure(options: argparse.Namespace, model: Path, vocab: int, dtype: str) -> dict[str, Any]:
    """Rows of one dtype."""
    found, skipped = peers(options, model, dtype)
    numbers = random.Random(0)

    def fresh(count: int) -> list[list[int]]:
        return [[numbers.randrange(10, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(count)]

    for name, reason in skipped.items():
        say(f"{dtype} {name}: SKIPPED, {reason}")
    seconds: dict[tuple[str, int], list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name, peer in found.items():
            stack.push_async_callback(peer.stop)
            await peer.start()
            for streams in PEERS[name]:
                await peer.run(fresh(streams), 8)  # warm
        for repetition in range(options.repeat):
            for name, peer in found.items():
                for streams in PEERS[name]:
                    took = await peer.run(fresh(streams), options.tokens)
                    seconds.setdefault((name, streams), []).append(took)
                    say(f"{dtype} {repetition} {name} x{streams}: {streams * options.tokens / took:.1f} tok/s")
    rows: list[dict[str, Any]] = []
    for (name, streams), times in seconds.items():
        row: dict[str, Any] = {"engine": name, "dtype": dtype, "streams": streams}
        Spread.of([streams * options.tokens / one for one in times]).into(row, "tok_per_s", 1)
        rows.append(row)
    return {"rows": rows, "ratios": ratios(rows), "skipped": skipped}


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of medians: what the engine is held to."""
    rate = {(row["engine"], row["streams"]): row["tok_per_s"] for row in rows}
    own = rate["evap", 1]
    found = {f"evap_x{streams}_over_own_single": rate["evap", streams] / own for streams in STREAMS[1:]}
    for (name, streams), theirs in rate.items():
        if name != "evap":
            found[f"evap_over_{name}_x{streams}"] = rate["evap", streams] / theirs
    return {key: round(value, 2) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the least number of repetitions, bfloat16 only")
    parser.add_argument("--json", default="-", help="where the document goes; - is stdout")
    parser.add_argument("--model", default="", help="as for `evap serve`; Llama family")
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    options = parser.parse_args()
    options.repeat, options.tokens = (3, 48) if options.quick else (7, 96)
    os.environ.update({key: value for key, value in ENV.items() if key.startswith("GOMP")})
    model = resolve(options.model).path
    vocab = int(json.loads((model / "config.json").read_text())["vocab_size"])
    results = [
        asyncio.run(measure(options, model, vocab, dtype))
        for dtype in (("bfloat16",) if options.quick else ("bfloat16", "float32"))
    ]
    emit({"bench": "torch_engine", "machine": machine(), "versions": versions("torch", "transformers"),
          "model": model.name, "prompt_tokens": PROMPT_TOKENS, "tokens": options.tokens,
          "repetitions": options.repeat, "results": results}, options.json)  # fmt: skip


if __name__ == "__main__":
    main()
