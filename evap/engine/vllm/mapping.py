"""A GenerateRequest -> what vLLM's engine core takes, and what is refused before it gets there.

AsyncLLM's front-end completes sampling parameters against the model (end-of-sequence ids, the generation
configuration) and refuses what would crash the engine: out-of-vocabulary ids, schemas that no grammar can be made of,
prompts that do not fit. Below AsyncLLM that is our work; vLLM's own checks are called wherever they exist.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from evap.engine.vllm import names
from evap.engine.vllm.constraints import GUIDED, texts, whole
from evap.engine.vllm.constraints import constraint as constrain
from evap.errors import ContextOverflow, InvalidRequest, NotFound, StartupError, echo
from evap.messages import GenerateRequest, SamplingParams, id_list, span

MAX_LISTED: Final = 1024  #: ids in stop_token_ids, logit_bias, allowed_token_ids
MAX_BAD_WORDS: Final = 64
MAX_WORD_CHARS: Final = 256
MAX_CHECKED: Final = 256  #: constraints whose check is remembered
_encode: Final = msgspec.msgpack.Encoder().encode
#: What vLLM's checks raise for a request that it does not take.
_REFUSALS: Final = (names.VLLMClientError, ValueError, TypeError, OverflowError, RecursionError)
#: sampling.extra: name -> the message's parameter; anything else is refused
EXTRAS: Final = frozenset(
    {
        "response_format",
        "structured_outputs",
        *GUIDED,
        "bad_words",
        "allowed_token_ids",
        "prompt_logprobs",
        "repetition_detection",
    }
)
_PLAIN: Final = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "logprobs",
)


class Mapper:
    """Made once per engine start, with the final configuration of the engine. `check` may be called from threads."""

    def __init__(self, vllm_config: Any, lora: Sequence[str] = ()) -> None:
        self._config = vllm_config
        self._model = vllm_config.model_config
        self._tokenizer = names.cached_tokenizer_from_config(self._model)
        self._generation = self._model.try_get_generation_config()
        self._eos = getattr(self._tokenizer, "eos_token_id", None)
        self.vocab_size = int(self._model.get_vocab_size())
        self.max_model_len = int(self._model.max_model_len)
        self.adapters = adapters(lora)
        self._known: OrderedDict[bytes, Any] = OrderedDict()  # SamplingParams, encoded -> vLLM's
        self._checked: OrderedDict[str, Any] = OrderedDict()  # a constraint's JSON -> StructuredOutputsParams, checked
        maximum = int(self._model.max_logprobs)
        self._max_logprobs = self.vocab_size if maximum < 0 else maximum

    def build(self, request: GenerateRequest, request_id: str, arrival_s: float = 0.0) -> Any:
        """EngineCoreRequest. Raises InvalidRequest; nothing has reached the engine then."""
        params = self.params(request.sampling, request.prompt_ids)
        return names.EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=id_list(request.prompt_ids),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=arrival_s,
            lora_request=self._adapter(request.adapter),
            cache_salt=request.cache_salt or None,
            data_parallel_rank=None,
            priority=request.priority,
        )

    def check(self, sampling: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """Raises InvalidRequest for what `build` would refuse. Slow parts (grammars) are remembered for `build`.

        Plain requests cost nothing here: their ranges and ids have been checked by the API and `check_request`.
        """
        if sampling.extra or sampling.logprobs is not None or sampling.logit_bias or sampling.stop_token_ids:
            self.params(sampling, prompt_ids)

    def params(self, sampling: SamplingParams, prompt_ids: Sequence[int]) -> Any:
        """vLLM's SamplingParams, verified and completed for this model; equal ones are made once."""
        self._ids(sampling, prompt_ids)
        if sampling.extra:
            return self._make(sampling)
        key = _encode(sampling)
        known = self._known.get(key)
        if known is None:
            known = self._make(sampling)
            while len(self._known) >= MAX_CHECKED:
                self._known.popitem(last=False)
            self._known[key] = known
        return known

    def _make(self, sampling: SamplingParams) -> Any:
        given = {name: getattr(sampling, name) for name in _PLAIN}
        if sampling.seed is not None:
            given["seed"] = _seed(sampling.seed)
        if sampling.logit_bias:
            given["logit_bias"] = dict(sampling.logit_bias)
        if sampling.stop_token_ids:
            given["stop_token_ids"] = list(sampling.stop_token_ids)
        extra = self._extras(sampling.extra) if sampling.extra else {}
        try:
            params = names.SamplingParams(
                **given, **extra, detokenize=False, skip_clone=True, output_kind=names.RequestOutputKind.DELTA
            )
            self._verify(params)
            params.update_from_generation_config(self._generation, self._eos)
            if extra.get("bad_words"):
                params.update_from_tokenizer(self._tokenizer)
        except _REFUSALS as e:
            raise _refused(e) from e
        return params

    def _ids(self, sampling: SamplingParams, prompt_ids: Sequence[int]) -> None:
        count = len(prompt_ids)
        if not count:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if count >= self.max_model_len:
            raise ContextOverflow(
                f"the prompt has {count} tokens; the context holds {self.max_model_len} with the answer", param="prompt"
            )
        self._in_vocabulary(prompt_ids, "prompt")
        for param, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            if len(ids) > MAX_LISTED:
                raise InvalidRequest(f"{param} has more than {MAX_LISTED} entries", param=param)
            self._in_vocabulary(ids, param)

    def _in_vocabulary(self, ids: Any, param: str) -> None:
        low, high = span(ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequest(
                f"token id {echo(bad)} is out of the vocabulary (0..{self.vocab_size - 1})", param=param
            )

    def _adapter(self, name: str) -> Any:
        if not name:
            return None
        if name not in self.adapters:
            raise NotFound(f"the adapter {echo(name)!r} is not loaded here", param="model", code="model_not_found")
        number, path = self.adapters[name]
        return names.LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)

    # What only vLLM has

    def _extras(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(extra) - EXTRAS)
        if unknown:
            raise InvalidRequest(f"{echo(unknown[0])} is not supported by this engine", param=echo(unknown[0]))
        found: dict[str, Any] = {}
        constraint = constrain(extra)
        if constraint:
            found["structured_outputs"] = self._structured(constraint)
        if extra.get("bad_words") is not None:
            found["bad_words"] = texts(extra["bad_words"], "bad_words", MAX_BAD_WORDS, MAX_WORD_CHARS)
        if extra.get("allowed_token_ids") is not None:
            found["allowed_token_ids"] = self._allowed(extra["allowed_token_ids"])
        if extra.get("prompt_logprobs") is not None:
            found["prompt_logprobs"] = whole(extra["prompt_logprobs"], "prompt_logprobs", 0, self._max_logprobs)
        if extra.get("repetition_detection") is not None:
            found["repetition_detection"] = _repetition(extra["repetition_detection"])
        return found

    def _allowed(self, ids: Any) -> list[int]:
        if not isinstance(ids, (list, tuple)) or not 0 < len(ids) <= MAX_LISTED or not all(type(i) is int for i in ids):
            raise InvalidRequest(f"allowed_token_ids must be 1 to {MAX_LISTED} token ids", param="allowed_token_ids")
        self._in_vocabulary(ids, "allowed_token_ids")
        return list(ids)

    def _structured(self, constraint: dict[str, Any]) -> Any:
        """A checked constraint, from memory if it was seen before."""
        key = json.dumps(constraint, sort_keys=True)
        checked = self._checked.get(key)
        if checked is None:
            checked = self._check_constraint(constraint)
            while len(self._checked) >= MAX_CHECKED:
                self._checked.popitem(last=False)
            self._checked[key] = checked
        return checked

    def _check_constraint(self, constraint: dict[str, Any]) -> Any:
        try:
            params = names.SamplingParams(
                structured_outputs=names.StructuredOutputsParams(**constraint), detokenize=False
            )
            self._verify(params)
        except _REFUSALS as e:
            raise _refused(e, "response_format") from e
        return params.structured_outputs

    def _verify(self, params: Any) -> None:
        params.verify(
            self._model, self._config.speculative_config, self._config.structured_outputs_config, self._tokenizer
        )


def adapters(lora: Sequence[str]) -> dict[str, tuple[int, str]]:
    """`name=path` texts -> name: (vLLM's number, path). Raises StartupError."""
    found: dict[str, tuple[int, str]] = {}
    for number, item in enumerate(lora, 1):
        name, _, path = item.partition("=")
        if not name or not path:
            raise StartupError(
                f"--lora {echo(item)}: expected name=path", remedy="--lora my-adapter=/models/my-adapter"
            )
        if not (Path(path) / "adapter_config.json").exists():
            raise StartupError(f"--lora {echo(name)}: there is no adapter_config.json in {path}")
        if name in found:
            raise StartupError(f"--lora {echo(name)} is given twice")
        found[name] = number, path
    return found


def _repetition(value: Any) -> Any:
    fields = ("max_pattern_size", "min_pattern_size", "min_count")
    if not isinstance(value, dict) or set(value) - set(fields):
        raise InvalidRequest("repetition_detection takes " + ", ".join(fields), param="repetition_detection")
    sizes = {name: whole(value.get(name, 0), f"repetition_detection.{name}", 0, 1024) for name in value}
    try:
        return names.RepetitionDetectionParams(**sizes)
    except _REFUSALS as e:
        raise _refused(e, "repetition_detection") from e


def _seed(seed: int) -> int:
    """torch's generators and the wire take int64; vLLM reads -1 as "none"."""
    return seed & 0x7FFF_FFFF_FFFF_FFFF


def _refused(error: BaseException, param: str | None = None) -> InvalidRequest:
    """vLLM's refusal, without more than a line of it (it quotes its input)."""
    named = getattr(error, "parameter", None)
    lines = str(error.args[0] if error.args else "").strip().splitlines() or [type(error).__name__]
    text = lines[0]
    return InvalidRequest(text[:200], param=named if isinstance(named, str) else param)
