"""evap's options and `--vllm-arg key=value` -> vLLM's configuration. vLLM's own parser checks every value.

evap's flags come first and `--vllm-arg` after them; a key that evap's own flag has already set to something else, and
keys that belong to evap (the scheduler class, say), are refused rather than silently overruled.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from evap.config import EngineConfig
from evap.engine.vllm import names
from evap.engine.vllm.shared import CONFIG_KEY, Shared
from evap.errors import StartupError, echo

#: keys of EngineArgs that are evap's: what to use instead
OWN: Final[dict[str, str]] = {
    "model": "the MODEL argument",
    "tokenizer": "the MODEL argument: evap and vLLM must use the same tokenizer",
    "served_model_name": "--served-model-name",
    "scheduler_cls": "--token-path scheduler",
    "worker_extension_cls": "evap's meter, which needs it",
    "additional_config": "evap, which talks to its parts in the engine with it",
    "logging_config": "--log-level",
    "log_config_file": "--log-level",
    "disable_log_stats": "evap's own metrics",
    "enable_log_requests": "--log-level debug",
    "skip_tokenizer_init": "evap, whose checks of structured output need the tokenizer",
}
#: evap's flag -> vLLM's key; passed on when it is not the default
FLAGS: Final[dict[str, str]] = {
    "dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "enforce_eager": "enforce_eager",
    "generation_config": "generation_config",
}
WORKER: Final = "evap.engine.vllm.worker.Meter"
#: by the token path, and whether the engine schedules asynchronously
SCHEDULERS: Final = {
    ("core", False): "evap.engine.vllm.usage.TellingScheduler",
    ("core", True): "evap.engine.vllm.usage.AsyncTellingScheduler",
    ("scheduler", False): "evap.engine.vllm.scheduler.RingScheduler",
    ("scheduler", True): "evap.engine.vllm.scheduler.AsyncRingScheduler",
}


def pairs(given: Sequence[str]) -> dict[str, str]:
    """`key=value` texts as a mapping; a bare key means true. Raises StartupError for a key given twice."""
    found: dict[str, str] = {}
    for item in given:
        key, equals, value = item.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not re.fullmatch(r"[A-Za-z_][\w.]*", key):
            raise StartupError(f"--vllm-arg {echo(item)}: expected key=value", remedy="--vllm-arg block_size=32, say")
        if key in found:
            raise StartupError(f"--vllm-arg {key} is given twice", remedy="keep one of them")
        found[key] = value if equals else "true"
    return found


class _Parser(names.FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser, which raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise StartupError(f"vLLM refuses an option: {message}", remedy="--vllm-arg help:KEY explains one of them")


def _parser() -> _Parser:
    parser = _Parser(add_help=False, exit_on_error=False)
    names.AsyncEngineArgs.add_cli_args(parser)
    return parser


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Every key that may follow --vllm-arg, and its action."""
    options = parser._option_string_actions  # argparse has no public list of what it knows
    return {flag[2:].replace("-", "_"): action for flag, action in options.items() if flag.startswith("--")}


def engine_args(config: EngineConfig, model: Path, shared: Shared | None, gpus: Sequence[int] = ()) -> Any:
    """AsyncEngineArgs for one replica. `gpus`: the devices it may use; empty: vLLM's choice.

    Raises StartupError for an unknown key (with the nearest known one), a bad value, or a conflict with evap's flags.
    """
    given = pairs(config.vllm_arg)
    parser = _parser()
    actions = _actions(parser)
    _explain(given, actions)
    wanted = {**_from_flags(config), **dict(_checked(given, actions, config))}
    if config.rope_scaling:
        wanted["hf_overrides"] = json.dumps(rope_overrides(model, json.loads(config.rope_scaling)))
    words = ["--model", str(model), *(word for item in wanted.items() for word in _words(actions, *item))]
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints):
            parsed = parser.parse_args(words)
        args = names.AsyncEngineArgs.from_cli_args(parsed)
    except (argparse.ArgumentError, ValueError, TypeError, SystemExit) as e:
        raise StartupError(f"vLLM refuses its options: {complaints.getvalue() or e}") from e
    return _own(args, config, shared, gpus)


def _explain(given: Mapping[str, str], actions: Mapping[str, argparse.Action]) -> None:
    """`--vllm-arg help` and `--vllm-arg help=KEY`."""
    if "help" not in given:
        return
    key = given["help"].replace("-", "_")
    if key in actions:
        text = " ".join((actions[key].help or "no help").split())
        raise StartupError(f"vLLM's {key}: {text} (default {actions[key].default})", remedy=f"--vllm-arg {key}=...")
    if key != "true":
        raise _unknown(key, actions)
    raise StartupError("vLLM's options: " + " ".join(sorted(k for k in actions if not k.startswith("no_"))))


def _unknown(key: str, actions: Mapping[str, argparse.Action]) -> StartupError:
    near = difflib.get_close_matches(key, list(actions), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "--vllm-arg help lists them"
    return StartupError(f"--vllm-arg {echo(key)}: vLLM {names.VERSION} has no such option", remedy=hint)


def _checked(
    given: Mapping[str, str], actions: Mapping[str, argparse.Action], config: EngineConfig
) -> Iterator[tuple[str, str]]:
    own = _from_flags(config)
    for key, value in given.items():
        root = key.split(".")[0]
        if root in OWN:
            raise StartupError(f"--vllm-arg {key} is evap's own", remedy=f"use {OWN[root]}")
        if root not in actions:
            raise _unknown(key, actions)
        if own.get(key, value) != value:
            raise StartupError(f"--vllm-arg {key}={echo(value)} contradicts evap's own flag", remedy="keep one of them")
        yield key, value


def _from_flags(config: EngineConfig) -> dict[str, str]:
    defaults = EngineConfig()
    found: dict[str, str] = {}
    for flag, key in FLAGS.items():
        value = getattr(config, flag)
        if value != getattr(defaults, flag):
            found[key] = str(value).lower() if isinstance(value, bool) else str(value)
    found["max_num_seqs"] = str(config.max_num_seqs or config.max_running)
    if "scheduling_policy" not in pairs(config.vllm_arg):
        found["scheduling_policy"] = "priority"  # of equal priorities the first comes first, as ever
    if config.max_model_len:
        found["max_model_len"] = str(config.max_model_len)
    if config.kv_cache_mb:
        found["kv_cache_memory_bytes"] = str(config.kv_cache_mb << 20)
    elif (
        _cpu() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ and "kv_cache_memory_bytes" not in pairs(config.vllm_arg)
    ):
        found["kv_cache_memory_bytes"] = str(cpu_kv_bytes(_meminfo()))
    if config.lora:
        # The CPU build's kernels take slot -1 of requests without an adapter for the last slot: it must stay empty.
        found |= {"enable_lora": "true", "max_loras": str(len(config.lora) + _cpu())}
    return found


def _cpu() -> bool:
    return bool(names.current_platform.is_cpu())


def _meminfo() -> str:
    try:
        return Path("/proc/meminfo").read_text()
    except OSError:
        return ""


def cpu_kv_bytes(meminfo: str) -> int:
    """KV cache on a CPU: a quarter of the available memory, 256 MiB to 8 GiB.

    vLLM's own default is 0.9 of all memory, which fails on a machine that does anything else.
    """
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    return max(256 << 20, min(8 << 30, int(found[1]) * 1024 // 4 if found else 1 << 30))


#: RoPE types whose configuration holds the stretched length already; vLLM stretches that of all others by the factor.
_PRESTRETCHED: Final = ("yarn", "llama3", "longrope", "su")


def rope_overrides(model: Path, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The model's RoPE parameters with `scaling` over them: an override replaces the whole object, theta included.

    transformers 5 keeps theta in `rope_parameters`; configurations written by older ones have it beside that.
    """
    try:
        own = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        own = {}
    theta = {"rope_theta": own["rope_theta"]} if "rope_theta" in own else {}
    rope = {**theta, **(own.get("rope_parameters") or {}), **scaling}
    found: dict[str, Any] = {"rope_parameters": rope}
    length = rope.get("original_max_position_embeddings") or own.get("max_position_embeddings")
    if rope.get("rope_type") in _PRESTRETCHED and length and rope.get("factor"):
        rope["original_max_position_embeddings"] = length
        found["max_position_embeddings"] = int(length * float(rope["factor"]))
    return found


def _words(actions: Mapping[str, argparse.Action], key: str, value: str) -> list[str]:
    """One option on vLLM's command line. Booleans become --key or --no-key."""
    action = actions.get(key)
    flag = "--" + key.replace("_", "-")
    if action is not None and action.nargs == 0:
        if value.lower() not in ("true", "false", "1", "0"):
            remedy = f"--vllm-arg {key}=true"
            raise StartupError(f"--vllm-arg {key}={echo(value)}: expected true or false", remedy=remedy)
        return [flag] if value.lower() in ("true", "1") else ["--no-" + key.replace("_", "-")]
    return [f"{flag}={value}"]


def _check_seam(config: EngineConfig, args: Any) -> None:
    """What the two seams cannot do."""
    if config.vllm_seam == "async-llm" and config.token_path != "core":  # noqa: S105  # a way for tokens, not a secret
        raise StartupError("--vllm-seam async-llm takes tokens from messages only", remedy="--token-path core")
    if config.vllm_seam == "core" and args.data_parallel_size > 1:
        raise StartupError(
            "data_parallel_size needs --vllm-seam async-llm",
            remedy="or --replicas N: engines of their own, which evap chooses from",
        )


def _own(args: Any, config: EngineConfig, shared: Shared | None, gpus: Sequence[int]) -> Any:
    """Fields that only evap sets."""
    _check_seam(config, args)
    args.disable_log_stats = True
    args.enable_log_requests = False
    if gpus and not _cpu():
        args.device_ids = list(gpus)
    if shared is not None:
        args.additional_config = {**(args.additional_config or {}), CONFIG_KEY: shared.settings}
        args.worker_extension_cls = WORKER
    return args


def engine_config(config: EngineConfig, model: Path, shared: Shared | None, gpus: Sequence[int] = ()) -> Any:
    """VllmConfig for one replica. Takes seconds; run it in a thread. Raises StartupError."""
    args = engine_args(config, model, shared, gpus)
    try:
        vllm_config = args.create_engine_config(usage_context=names.UsageContext.ENGINE_CONTEXT)
    except (ValueError, TypeError, NotImplementedError, OSError, RuntimeError) as e:  # vLLM's checks of a configuration
        raise StartupError(f"vLLM refuses this configuration: {_first_line(e)}") from e
    if shared is not None:
        choose_scheduler(vllm_config.scheduler_config, config.token_path)
    return vllm_config


def choose_scheduler(scheduler_config: Any, path: str) -> None:
    """Our scheduler in place of vLLM's, derived from the one that vLLM would take. Where that is a special one (of
    diffusion models), tokens cannot take the ring, and nothing is said of the KV cache.

    To be called on the complete configuration: a scheduler named earlier can switch async scheduling off.
    """
    if scheduler_config.scheduler_cls is None:
        scheduler_config.scheduler_cls = SCHEDULERS[path, bool(scheduler_config.async_scheduling)]
    elif path == "scheduler":
        raise StartupError(f"vLLM wants its {scheduler_config.scheduler_cls} here", remedy="--token-path core")


def _first_line(error: BaseException) -> str:
    """The sentence that matters in pydantic's and vLLM's multi-line messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    values = [line.removeprefix("Value error, ") for line in lines if line.startswith("Value error, ")]
    return re.sub(r" \[type=.*", "", (values or lines or [type(error).__name__])[0])
