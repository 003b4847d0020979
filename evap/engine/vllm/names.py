"""Every name of vLLM that evap's own process uses, imported in one place, and what evap expects of each.

vLLM's internals move between releases. `moved()` compares what is installed with what this code was written for, so
that an upgrade fails at start-up, in one line that says what moved, and not under a request.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Final

from vllm import __version__ as VERSION
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.utils import EngineZmqAddresses, launch_core_engines
from vllm.v1.executor import Executor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

__all__ = [
    "VERSION",
    "AsyncEngineArgs",
    "AsyncLLM",
    "EngineCoreClient",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreProc",
    "EngineCoreRequest",
    "EngineCoreRequestType",
    "EngineZmqAddresses",
    "Executor",
    "FinishReason",
    "FlexibleArgumentParser",
    "LoRARequest",
    "MsgpackDecoder",
    "MsgpackEncoder",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "UsageContext",
    "VLLMClientError",
    "cached_tokenizer_from_config",
    "current_platform",
    "launch_core_engines",
    "moved",
]

#: The releases whose internals this code was read against: at least, below.
SUPPORTED: Final = ((0, 32), (0, 34))

#: callable -> parameters that evap passes by name (or, before a "/", by position, in this order)
CALLS: Final[dict[str, tuple[str, ...]]] = {
    "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config": ("usage_context",),
    "vllm.engine.arg_utils:AsyncEngineArgs.add_cli_args": ("parser", "/"),
    "vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args": ("args", "/"),
    "vllm.v1.engine.core_client:EngineCoreClient.make_async_mp_client": (
        "vllm_config",
        "executor_class",
        "log_stats",
        "client_addresses",
        "client_count",
        "client_index",
        "renderer",
    ),
    "vllm.v1.engine.utils:launch_core_engines": ("vllm_config", "executor_class", "log_stats", "addresses", "/"),
    "vllm.v1.engine.core_client:MPClient.start_engine_core_monitor": ("self", "/"),
    "vllm.v1.engine.core:EngineCoreProc.process_output_sockets": ("self", "output_paths", "/"),
    "vllm.v1.serial_utils:MsgpackDecoder.decode": ("self", "bufs", "/"),
    "vllm.v1.serial_utils:MsgpackEncoder.encode": ("self", "obj", "/"),
    "vllm.v1.engine.core_client:MPClient.shutdown": ("self", "timeout", "/"),
    "vllm.v1.engine.core_client:MPClient._start_mm_warmup": ("self", "/"),
    "vllm.v1.engine.core:EngineCore.abort_requests": ("self", "request_ids", "/"),
    "vllm.v1.engine.core:EngineCore.is_scheduler_paused": ("self", "/"),
    "vllm.v1.engine.core:EngineCore.collective_rpc": ("self", "method", "timeout", "args", "kwargs", "/"),
    "vllm.v1.engine.core:EngineCoreProc._handle_client_request": ("self", "request_type", "request", "/"),
    "vllm.v1.engine.async_llm:AsyncLLM.from_vllm_config": ("vllm_config", "disable_log_stats"),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": ("prompt", "sampling_params", "request_id"),
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": ("self", "timeout", "/"),
    "vllm.v1.executor:Executor.get_class": ("vllm_config", "/"),
    "vllm.sampling_params:SamplingParams.verify": (
        "self",
        "model_config",
        "speculative_config",
        "structured_outputs_config",
        "tokenizer",
        "/",
    ),
    "vllm.sampling_params:SamplingParams.update_from_generation_config": (
        "self",
        "generation_config",
        "eos_token_id",
        "/",
    ),
    "vllm.sampling_params:SamplingParams.update_from_tokenizer": ("self", "tokenizer", "/"),
    "vllm.tokenizers:cached_tokenizer_from_config": ("model_config", "/"),
    "vllm.config:ModelConfig.try_get_generation_config": ("self", "/"),
    "vllm.config:ModelConfig.get_diff_sampling_param": ("self", "/"),
    "vllm.config:ModelConfig.get_vocab_size": ("self", "/"),
    "vllm.lora.request:LoRARequest": ("lora_name", "lora_int_id", "lora_path"),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (
        "self",
        "scheduler_output",
        "model_runner_output",
        "/",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ("self", "/"),
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": ("self", "request_ids", "finished_status", "/"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.usage.fget": ("self", "/"),
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": ("self", "request", "/"),
    "vllm.v1.core.sched.scheduler:Scheduler.get_request_counts": ("self", "/"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": ("self", "grammar_output", "/"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": ("self", "scheduler_output", "/"),
}

#: type -> fields that evap sets or reads; order and place do not matter
FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "vllm.v1.engine.utils:EngineZmqAddresses": ("inputs", "outputs"),
    "vllm.v1.engine.utils:CoreEngineLaunch": ("engine_manager",),
    "vllm.v1.engine:EngineCoreRequest": (
        "request_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "arrival_time",
        "lora_request",
        "cache_salt",
        "data_parallel_rank",
        "client_index",
        "priority",
    ),
    "vllm.sampling_params:SamplingParams": (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "allowed_token_ids",
        "bad_words",
        "structured_outputs",
        "repetition_detection",
        "detokenize",
        "skip_clone",
        "output_kind",
    ),
    "vllm.sampling_params:StructuredOutputsParams": (
        "json",
        "regex",
        "choice",
        "grammar",
        "json_object",
        "structural_tag",
        "disable_any_whitespace",
        "whitespace_pattern",
    ),
    "vllm.sampling_params:RepetitionDetectionParams": ("max_pattern_size", "min_pattern_size", "min_count"),
    "vllm.v1.outputs:LogprobsLists": ("logprob_token_ids", "logprobs"),
    "vllm.v1.outputs:LogprobsTensors": ("logprob_token_ids", "logprobs"),
    "vllm.v1.outputs:ModelRunnerOutput": ("req_ids", "sampled_token_ids"),
    "vllm.v1.metrics.stats:PrefillStats": ("num_prompt_tokens", "num_cached_tokens"),
    "vllm.engine.arg_utils:AsyncEngineArgs": (
        "model",
        "additional_config",
        "device_ids",
        "hf_overrides",
        "kv_cache_memory_bytes",
        "logging_config",
        "scheduler_cls",
        "worker_extension_cls",
        "disable_log_stats",
    ),
}

#: structs whose *positions* evap decodes by itself: its own client reads these arrays without making vLLM's objects
ORDER: Final[dict[str, tuple[str, ...]]] = {
    "vllm.v1.engine:EngineCoreOutputs": (
        "engine_index",
        "outputs",
        "scheduler_stats",
        "timestamp",
        "utility_output",
    ),
    "vllm.v1.engine:EngineCoreOutput": (
        "request_id",
        "new_token_ids",
        "new_logprobs",
        "new_prompt_logprobs_tensors",
        "pooling_output",
        "finish_reason",
        "stop_reason",
        "events",
        "kv_transfer_params",
        "ec_transfer_params",
        "trace_headers",
        "prefill_stats",
    ),
    "vllm.v1.engine:UtilityOutput": ("call_id", "failure_message", "result"),
}

#: enumeration -> names that evap uses, with their values (both cross the wire)
VALUES: Final[dict[str, dict[str, Any]]] = {
    "vllm.v1.engine:FinishReason": {"STOP": 0, "LENGTH": 1, "ABORT": 2, "ERROR": 3, "REPETITION": 4},
    "vllm.v1.engine:EngineCoreRequestType": {"ADD": b"\x00", "ABORT": b"\x01", "UTILITY": b"\x03"},
}


def find(path: str) -> Any:
    """The object `module:Name.attribute`. Raises ImportError or AttributeError."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def fields_of(kind: Any) -> tuple[str, ...]:
    """Field names of a msgspec struct, a dataclass, a NamedTuple, or whatever __init__ takes."""
    for attribute in ("__struct_fields__", "_fields", "__dataclass_fields__"):
        names = getattr(kind, attribute, None)
        if names:
            return tuple(names)
    return tuple(inspect.signature(kind).parameters)


def moved() -> list[str]:
    """What is not as expected, one readable line each; empty when all is well."""
    found: list[str] = []
    for check, table in ((_call, CALLS), (_fields, FIELDS), (_order, ORDER), (_values, VALUES)):
        for path, expected in table.items():
            try:
                complaint = check(find(path), expected)
            except (ImportError, AttributeError, ValueError, TypeError) as e:
                complaint = f"is gone ({type(e).__name__}: {e})"
            if complaint:
                found.append(f"{path} {complaint}")
    return found


def _call(target: Any, expected: Any) -> str:
    names = list(inspect.signature(target).parameters)
    if "/" not in expected:
        missing = [name for name in expected if name not in names]
        return f"no longer takes {', '.join(missing)}" if missing else ""
    positional = list(expected[: expected.index("/")])
    if names[: len(positional)] == positional:
        return ""
    return f"takes ({', '.join(names)}), not ({', '.join(positional)})"


def _fields(target: Any, expected: Any) -> str:
    missing = [name for name in expected if name not in fields_of(target)]
    return f"has no field {', '.join(missing)}" if missing else ""


def _order(target: Any, expected: Any) -> str:
    names = fields_of(target)[: len(expected)]
    return "" if names == tuple(expected) else f"begins with ({', '.join(names)}), not ({', '.join(expected)})"


def _values(target: Any, expected: Any) -> str:
    changed = [name for name, value in expected.items() if getattr(target, name).value != value]
    return f"has other values for {', '.join(changed)}" if changed else ""
