"""Frozen structs per part; flags, EVAP_* and TOML all derive from the fields below (see `options.py`).

One field = one option: `max_body_bytes` is `--max-body-bytes`, `EVAP_MAX_BODY_BYTES`, and `max_body_bytes = ...`
in the table of its part (`[protocol]`). Defaults and units live here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

#: The names of the queue in front of the engine: who is refused depends on who fills it.
QUEUE: Final = "queue_share queue_full queue_pushed_out"


def opt(
    default: Any, help: str, *, choices: tuple[str, ...] = (), low: float | None = None, high: float | None = None,
    limit: str = "",
) -> Any:  # fmt: skip
    """A dataclass field that is an option. `low`/`high` are inclusive bounds, checked when the option is read. limit:
    the name under which `evap_limit_total` counts what it refuses; several, separated by blanks."""
    meta = {"help": help, "choices": choices, "low": low, "high": high, "limits": tuple(limit.split())}
    if isinstance(default, (list, dict)):
        raise TypeError("option defaults must be immutable")
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where to listen and how to speak of it."""

    host: str = opt("127.0.0.1", "address to listen on; 'none' for no TCP port")
    port: int = opt(8000, "port to listen on; 0 picks a free one and prints it", low=0, high=65535)
    uds: str = opt("", "path of a UNIX socket to listen on as well; always without TLS")
    workers: int = opt(1, "loop processes that accept connections and share the engine", low=1, high=64)
    uds_mode: str = opt("660", "permissions of that socket's file")
    tls_cert: str = opt("", "PEM file with the certificate chain; turns TLS on")
    tls_key: str = opt("", "PEM file with the private key")
    tls_client_ca: str = opt(
        "", "PEM file with authorities; only clients with a certificate from one of them are served"
    )
    tls: str = opt("", "'self-signed' makes a certificate for development", choices=("", "self-signed"))
    log_level: str = opt("info", "least severe level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = opt("text", "log lines for people or for machines", choices=("text", "json"))
    log_requests: bool = opt(True, "a log line for each request; without, only for those that the server failed")
    otel_endpoint: str = opt("", "OTLP/HTTP collector that is sent a span for each request, e.g. http://localhost:4318")
    otel_sample: float = opt(1.0, "share of traces that are recorded, of those that begin here", low=0, high=1)
    drain_timeout_s: float = opt(30.0, "seconds that running streams may take after SIGTERM", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolConfig:
    """Limits and deadlines of the wire. Every one has a test, and is in docs/limits.md."""

    max_body_bytes: int = opt(64 << 20, "largest request body (413 beyond)", low=1, limit="body_size")
    max_concurrent_streams: int = opt(
        256, "streams a client may have open on one HTTP/2 connection", low=1, high=100_000, limit="streams"
    )
    stream_window_bytes: int = opt(
        1 << 20, "HTTP/2 flow-control window for a request body", low=65_535, high=(1 << 31) - 1
    )
    connection_window_bytes: int = opt(
        16 << 20, "HTTP/2 flow-control window for all bodies of a connection", low=65_535, high=(1 << 31) - 1
    )
    max_header_list_bytes: int = opt(
        32 << 10, "largest header list, as RFC 9113 counts it (431 beyond)", low=1024, limit="header_list"
    )
    max_headers: int = opt(100, "most header fields in a request (431 beyond)", low=8, limit="header_list")
    header_list_factor: int = opt(
        4, "a header list that is so many times too large ends its connection", low=1, high=100, limit="header_list"
    )
    max_header_block_bytes: int = opt(
        0, "HEADERS and its CONTINUATION frames together; 0: twice --max-header-list-bytes", low=0, limit="header_block"
    )
    max_continuations: int = opt(8, "CONTINUATION frames of one header block", low=0, high=1000, limit="header_block")
    max_request_line_bytes: int = opt(
        8 << 10, "longest request line of HTTP/1.1 (431 beyond)", low=1024, limit="header_list"
    )
    hpack_table_bytes: int = opt(
        4096, "HPACK table that a client may fill, which is held for each connection", low=0, high=1 << 20,
        limit="hpack_table",
    )  # fmt: skip
    max_settings: int = opt(32, "entries in one SETTINGS frame", low=8, high=2730, limit="settings")
    max_connections: int = opt(10_000, "most open connections", low=1, limit="connections")
    max_connections_per_address: int = opt(
        1_000, "most open connections of one IPv4 address or IPv6 /64 (a proxy needs many); 0: no limit", low=0,
        limit="connections_per_address",
    )  # fmt: skip
    max_open_streams: int = opt(
        20_000, "HTTP/2 streams of all connections together (REFUSED_STREAM beyond)", low=1, limit="open_streams"
    )
    max_buffered_header_bytes: int = opt(
        256 << 20, "octets of request headers held by all connections together (503 beyond)", low=1 << 16,
        limit="header_bytes",
    )  # fmt: skip
    max_buffered_body_bytes: int = opt(
        1 << 30, "request bytes held by all connections together (503 beyond)", low=1 << 20, limit="body_bytes"
    )
    large_body_bytes: int = opt(
        1 << 20, "larger request bodies are parsed and tokenized in a process of their own; 0: never", low=0
    )
    large_body_queue: int = opt(64, "large bodies that may wait to be parsed (503 beyond)", low=1, limit="large_queue")
    stream_buffer_bytes: int = opt(64 << 10, "unread bytes held for a slow reader before its tokens coalesce", low=1024)
    write_buffer_bytes: int = opt(
        256 << 10, "unsent bytes of a connection above which it is neither written to nor read", low=32 << 10,
        limit="stall_timeout",
    )  # fmt: skip
    coalesce_ms: float = opt(
        0.0, "hold tokens for so long that several go out in one write; 0: each step at once", low=0
    )
    stall_timeout_s: float = opt(
        30.0, "seconds a reader may take no byte before its stream is cancelled", low=0.05, limit="stall_timeout"
    )
    min_progress_bytes: int = opt(
        1024, "a reader that takes less than this within --stall-timeout counts as one that takes nothing", low=1,
        limit="stall_timeout",
    )  # fmt: skip
    preface_timeout_s: float = opt(
        10.0, "seconds for the first request line, or the HTTP/2 preface and SETTINGS", low=0.05,
        limit="preface_timeout",
    )  # fmt: skip
    settings_timeout_s: float = opt(
        10.0, "seconds for the acknowledgement of our SETTINGS", low=0.05, limit="settings_timeout"
    )
    header_timeout_s: float = opt(10.0, "seconds for a request's complete head", low=0.05, limit="header_timeout")
    body_timeout_s: float = opt(
        60.0, "seconds without a byte of an unfinished request body (408)", low=0.05, limit="body_timeout"
    )
    idle_timeout_s: float = opt(
        300.0, "seconds a connection without requests stays open", low=0.05, limit="idle_timeout"
    )
    linger_s: float = opt(
        1.0, "seconds for which what a client still sends after its answer is read and thrown away", low=0, high=60
    )
    discard_bytes: int = opt(
        64 << 20, "octets of an unwanted body that are read and thrown away", low=0, limit="unwanted_body"
    )
    keepalive_comment_s: float = opt(
        15.0, "seconds of silence after which a stream gets an SSE comment; 0 never", low=0
    )
    push_max_promises: int = opt(
        32, "pushed answers that may be open on one HTTP/2 connection; 0: nothing is ever pushed", low=0, high=1000
    )
    push_reserve_bytes: int = opt(
        16 << 10, "HTTP/2 connection window that pushed answers leave to the others", low=0, high=1 << 30
    )
    push_keep_s: float = opt(60.0, "seconds for which a pushed answer can be fetched again", low=0)
    push_memory_bytes: int = opt(64 << 20, "memory for pushed answers that can be fetched again", low=0)
    reset_burst: int = opt(100, "resets (by client or provoked) a connection may make at once", low=1, limit="resets")
    reset_per_s: float = opt(20.0, "resets a connection may make per second", low=0.1, limit="resets")
    control_burst: int = opt(
        1000, "PING, SETTINGS, PRIORITY, unknown frames and tiny DATA at once, and WINDOW_UPDATE frames", low=10,
        limit="control_frames window_updates",
    )  # fmt: skip
    control_per_s: float = opt(
        200.0, "the same per second", low=1, limit="control_frames window_updates late_frames refused_streams"
    )
    tiny_data_bytes: int = opt(
        64, "DATA with less in it, and not the last, counts as a control frame", low=0, high=16_384,
        limit="control_frames",
    )  # fmt: skip
    window_update_credit: int = opt(
        4, "WINDOW_UPDATE frames that each DATA frame of ours allows a client", low=0, high=1000,
        limit="window_updates",
    )  # fmt: skip
    late_burst: int = opt(
        2048, "frames on streams that are closed, and streams refused before the client knows our limit, at once",
        low=10, limit="late_frames refused_streams",
    )  # fmt: skip
    frames_at_once: int = opt(
        64, "frames of a connection that are handled before others have their turn", low=1, high=100_000,
        limit="frames_at_once",
    )  # fmt: skip
    max_tiny_chunks: int = opt(
        1 << 16, "HTTP/1.1 chunks of less than 64 bytes in one body (400 beyond)", low=1, limit="tiny_chunks"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Which engine and model."""

    model: str = opt("", "directory, Hugging Face id, or built-in name (default smollm2-135m)")
    engine: str = opt("auto", "what generates tokens", choices=("auto", "torch", "vllm", "synthetic"))
    served_model_name: str = opt("", "name that clients use; default: the model's")
    max_model_len: int = opt(0, "context in tokens; 0: the model's own", low=0, high=10_000_000)
    dtype: str = opt("auto", "arithmetic of the model", choices=("auto", "bfloat16", "float16", "float32"))
    device: str = opt("auto", "'cpu', 'cuda' or 'cuda:N'; auto takes a GPU if there is one")
    max_running: int = opt(64, "generations that run at once in an engine", low=1, high=4096)
    max_queued_requests: int = opt(
        1024, "requests that may wait for the engine (429 or 503 beyond)", low=0, limit=QUEUE
    )
    max_queued_tokens: int = opt(
        2_000_000, "prompt tokens that may wait for the engine, estimated as 4 octets each (429 or 503 beyond)", low=0,
        limit=QUEUE,
    )  # fmt: skip
    ttft_timeout_s: float = opt(
        600.0, "seconds until a request's first token, waiting included (an error beyond); 0 never", low=0, limit="ttft"
    )
    max_choices: int = opt(128, "largest n of a request", low=1, high=1024)
    kv_cache_mb: int = opt(0, "memory for the KV cache of the torch engine; 0: chosen from what is free", low=0)
    prefill_chunk: int = opt(512, "most prompt tokens per step of the torch engine", low=16)
    threads: int = opt(0, "CPU threads of the torch engine; 0: all cores", low=0)
    rope_scaling: str = opt(
        "", 'JSON that overrides the model\'s RoPE scaling, e.g. \'{"rope_type":"dynamic","factor":4}\''
    )
    replicas: int = opt(1, "engines on this node (vllm); each takes its own GPUs", low=1, high=64)
    vllm_arg: tuple[str, ...] = opt(
        (), "key=value: any of vLLM's EngineArgs; may be repeated; 'help' or 'help:key' explains them"
    )
    vllm_seam: str = opt(
        "core",
        "where evap takes tokens from vLLM: its engine core's client, or AsyncLLM",
        choices=("core", "async-llm"),
    )
    token_path: str = opt(
        "core",
        "how tokens come out of vLLM's engine core: its messages, or a shared ring",
        choices=("core", "scheduler"),
    )
    tensor_parallel_size: int = opt(1, "GPUs that share one replica's model (vllm)", low=1, high=1024)
    max_num_seqs: int = opt(0, "generations that run at once in vLLM; 0: the same as --max-running", low=0, high=4096)
    gpu_memory_utilization: float = opt(0.9, "share of a device's memory that vLLM may take", low=0.01, high=1.0)
    quantization: str = opt("", "quantization method of the weights (vllm), e.g. awq or fp8; empty: the model's own")
    kv_cache_dtype: str = opt("auto", "data type of vLLM's KV cache, e.g. fp8")
    enforce_eager: bool = opt(False, "vLLM without CUDA graphs and compilation: starts faster, runs slower")
    lora: tuple[str, ...] = opt(
        (), "name=path of a LoRA adapter (vllm), which clients name as the model; may be repeated"
    )
    generation_config: str = opt(
        "auto",
        "whose sampling defaults hold for what a request leaves open: the model's generation_config.json (auto), that "
        "of another directory, or nobody's but the API's (vllm)",
    )
    token_cache_mb: int = opt(64, "memory for token ids of conversations seen before; 0 switches it off", low=0)
    synthetic_ttft_ms: float = opt(0.0, "synthetic engine: time to the first token", low=0)
    synthetic_step_ms: float = opt(10.0, "synthetic engine: time between tokens; 0: as fast as it goes", low=0)
    synthetic_tokens: int = opt(128, "synthetic engine: tokens of an answer without max_tokens", low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterConfig:
    """Accounts and the ledger."""

    data_dir: str = opt("", "directory for the usage ledger; empty: no ledger is kept")
    api_keys: str = opt("", "TOML file with API keys and their limits; empty: no key is asked for")
    billable: str = opt("delivered", "tokens of an answer that count", choices=("delivered", "emitted"))
    prices: str = opt("", "TOML file with prices per model, for costs in /v1/usage")
    usage_sink: str = opt("", "postgresql:// URL to which usage records are copied in the background")
    hang_timeout_s: float = opt(
        120.0, "seconds without progress of a working engine after which /ready is 503; 0 never", low=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server: ServerConfig = ServerConfig()
    protocol: ProtocolConfig = ProtocolConfig()
    engine: EngineConfig = EngineConfig()
    meter: MeterConfig = MeterConfig()
