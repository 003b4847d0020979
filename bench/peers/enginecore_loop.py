"""The floor: no front-end at all. A loop that submits requests to vLLM's EngineCore and takes its output batches.

    python -m bench.peers.enginecore_loop MODEL KV_BYTES

Prints `ready`; then answers each line `CONCURRENCY REQUESTS TOKENS` on stdin with one JSON line
{"tokens", "seconds", "cpu_ns", "ttft_ms": [...], "itl_ms": [...]}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor

PROMPT = list(range(2, 42))


async def run(client: Any, base: int, concurrency: int, requests: int, tokens: int) -> dict[str, Any]:
    sent: dict[str, float] = {}
    started = time.perf_counter()
    cpu = time.process_time_ns()
    numbers = iter(range(base, base + requests))
    last: dict[str, float] = {}
    ttft: list[float] = []
    itl: list[float] = []

    async def submit() -> None:
        name = f"r{next(numbers)}"
        sent[name] = time.perf_counter()
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        await client.add_request_async(
            EngineCoreRequest(name, PROMPT, None, params, None, time.time(), None, None, None)
        )

    for _ in range(min(concurrency, requests)):
        await submit()
    total = open_ = 0
    open_ = requests
    while open_:
        batch = await client.get_output_async()
        now = time.perf_counter()
        for output in batch.outputs:
            total += len(output.new_token_ids)
            name = output.request_id
            (itl if name in last else ttft).append(now - last.get(name, sent[name]))
            last[name] = now
            if output.finish_reason is not None:
                open_ -= 1
                if len(sent) < requests:
                    await submit()
    seconds = time.perf_counter() - started
    return {"tokens": total, "seconds": seconds, "cpu_ns": time.process_time_ns() - cpu, "ttft_ms": ttft, "itl_ms": itl}


async def serve(model: str, kv_bytes: int) -> None:
    args = AsyncEngineArgs(
        model=model, enforce_eager=True, max_num_seqs=128, max_model_len=2048, disable_log_stats=True,
        kv_cache_memory_bytes=kv_bytes,
    )  # fmt: skip
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    client = EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), False)
    print("ready", flush=True)
    base = 0
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        concurrency, requests, tokens = map(int, line.split())
        found = await run(client, base, concurrency, requests, tokens)
        base += requests
        found["ttft_ms"] = sorted(1e3 * v for v in found["ttft_ms"])[:: max(1, requests // 100)]
        found["itl_ms"] = sorted(1e3 * v for v in found["itl_ms"])[:: max(1, len(found["itl_ms"]) // 1000)]
        print(json.dumps(found), flush=True)
    client.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
