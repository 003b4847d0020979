"""Random models of a few kilobytes whose greedy output is not one token for ever, and how to run them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from evap.config import EngineConfig
from evap.engine.torch.engine import Engine
from evap.engine.torch.load import Loaded, load
from evap.engine.torch.records import Records
from evap.messages import FINISH_MASK, META, NO_TOKEN, Finish, GenerateRequest, SamplingParams

VOCAB = 128
#: Logits of tiny float32 models agree with transformers' to this much (they are of order 1).
TOLERANCE = 2e-4


class Maker:
    """`make("Qwen3", tie_word_embeddings=True)` -> (Hugging Face model, its directory); each only once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._made: dict[str, tuple[Any, Path]] = {}

    def __call__(self, family: str = "Llama", *, shard: str = "1GB", **settings: Any) -> tuple[Any, Path]:
        key = repr((family, shard, sorted(settings.items())))
        if key not in self._made:
            self._made[key] = self._make(family, shard, settings)
        return self._made[key]

    def _make(self, family: str, shard: str, settings: dict[str, Any]) -> tuple[Any, Path]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's deprecations
            import transformers

            defaults = {
                "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
                "eos_token_id": 2, "tie_word_embeddings": False, "initializer_range": 0.3,
            }  # fmt: skip
            torch.manual_seed(1)
            config = getattr(transformers, f"{family}Config")(**{**defaults, **settings})
            model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if name.endswith("bias") or "norm" in name:  # zeros and ones would hide a mix-up
                        weight.uniform_(0.5, 1.5)
            path = self._factory.mktemp(family.lower())
            model.save_pretrained(path, max_shard_size=shard)
        return model, path


def load_tiny(path: Path, *, kv_tokens: int = 4096, **settings: Any) -> Loaded:
    """Loaded in float32 with one thread. kv_tokens of these shapes are 256 bytes a token and layer."""
    config = EngineConfig(dtype="float32", threads=1, kv_cache_mb=max(1, kv_tokens * 512 >> 20), **settings)
    return load(config, path, lambda line: None)


def prompts(count: int, lengths: Sequence[int] = (5, 17, 33, 60, 100, 16)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(count)]


def greedy(max_tokens: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)


class Outcome:
    """What an engine published, by slot."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.finish: dict[int, Finish] = {}

    def take(self, records: Records) -> None:
        for slot, token, index, flags in zip(records.slot, records.token, records.index, records.flags, strict=True):
            tokens = self.tokens.setdefault(slot, [])
            assert slot not in self.finish
            if flags & META:
                assert not tokens
                assert slot not in self.cached
                self.cached[slot] = token
                continue
            assert index == len(tokens)
            if not flags & NO_TOKEN:
                tokens.append(token)
            if flags & FINISH_MASK:
                self.finish[slot] = Finish(flags & FINISH_MASK)


def generate(engine: Engine, asked: Sequence[tuple[Sequence[int], SamplingParams]], together: bool = True) -> Outcome:
    """Run requests in slots 0, 1, ... to their ends, all at once or one after the other."""
    outcome = Outcome()
    for slot, (prompt, sampling) in enumerate(asked):
        engine.submit(slot, 1, GenerateRequest(prompt_ids=list(prompt), sampling=sampling))
        while not together and not engine.idle:
            outcome.take(engine.step())
    while not engine.idle:
        outcome.take(engine.step())
    return outcome


_answers: dict[tuple[int, tuple[int, ...], int], list[int]] = {}


def reference(model: Any, prompt: Sequence[int], max_tokens: int = 24) -> list[int]:
    """transformers' own greedy answer; asked for once (models of a session stay alive, so their ids do not recur)."""
    key = id(model), tuple(prompt), max_tokens
    if key not in _answers:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            done = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        _answers[key] = done[0, len(prompt) :].tolist()
    return _answers[key]
