"""One peer of bench.torch_engine, in the interpreter that has it: `python offline_generate.py KIND MODEL DTYPE`.

KIND is "hf" (transformers' generate) or "vllm" (vLLM's LLM class). Says "ready", then answers each line of JSON
{"prompts": [[ids]], "tokens": n} with {"seconds": s, "tokens": all}. Greedy, no end of sequence. It imports nothing of
evap's, so that it runs in an environment of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], int]


def hf(path: str, dtype: str) -> Generate:
    import torch  # noqa: PLC0415 - each kind has its own libraries
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], tokens: int) -> int:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
        return int((out.shape[1] - ids.shape[1]) * out.shape[0])

    return generate


def vllm(path: str, dtype: str) -> Generate:
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    llm = LLM(path, dtype=dtype, enforce_eager=True, max_model_len=2048, max_num_seqs=64, disable_log_stats=True)

    def generate(prompts: list[list[int]], tokens: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        return sum(len(out.outputs[0].token_ids) for out in llm.generate(asked, params, use_tqdm=False))

    return generate


def main() -> None:
    kind, path, dtype = sys.argv[1:]
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries that greet
    generate = {"hf": hf, "vllm": vllm}[kind](path, dtype)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        begin = time.perf_counter()
        count = generate(asked["prompts"], asked["tokens"])
        answers.write(json.dumps({"seconds": time.perf_counter() - begin, "tokens": count}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
