"""The tables of `docs/limits.md`, from the options. `python -m tests.tools.limits_table --write`."""

from __future__ import annotations

import sys
from typing import Final

from evap import dispatch
from evap.engine import chat_template
from evap.engine.vllm import constraints
from evap.metering import operations
from evap.options import Option, shown, table
from evap.protocol import headers, http1_parse, limits
from evap.protocol.api import body, chat, completions, fields
from tests.tools import pages
from tests.tools.architecture import ROOT

PAGE: Final = ROOT / "docs" / "limits.md"
MARK: Final = "<!-- tables: python -m tests.tools.limits_table --write -->"
END: Final = "<!-- end of tables -->"

CALM: Final = "GOAWAY ENHANCE_YOUR_CALM"
#: limit -> (what it bounds, what happens beyond it)
LIMITS: Final = {
    "connections": ("open connections", "503, and closed"),
    "connections_per_address": ("open connections of an IPv4 address or IPv6 /64", "503, and closed"),
    "streams": (
        "streams of a connection",
        "REFUSED_STREAM; after our SETTINGS were acknowledged it costs a reset, too",
    ),
    "open_streams": ("streams of all connections", "REFUSED_STREAM"),
    "header_list": ("header fields of a request", "431; many times over: " + CALM),
    "header_block": ("CONTINUATION frames, and octets of a header block", CALM),
    "header_bytes": ("heads in memory, of all connections", "503; an incomplete head: " + CALM),
    "hpack_table": ("a client's HPACK table", "GOAWAY COMPRESSION_ERROR"),
    "body_size": ("octets of a body", "413, before the body is uploaded where `content-length` says it"),
    "body_bytes": ("bodies in memory, of all connections", "503"),
    "unwanted_body": ("what still comes after an early answer", "RST_STREAM NO_ERROR"),
    "tiny_chunks": ("chunks of HTTP/1.1 below 64 bytes in a body", "400, and closed"),
    "resets": ("streams reset by the client or because of it (CVE-2023-44487, CVE-2025-8671)", CALM),
    "control_frames": ("PING, SETTINGS (4 each), PRIORITY, PRIORITY_UPDATE, unknown frames, tiny DATA", CALM),
    "window_updates": ("WINDOW_UPDATE frames", CALM),
    "late_frames": ("frames on closed streams", CALM),
    "refused_streams": ("streams refused before the client has acknowledged our SETTINGS", CALM),
    "settings": ("entries in one SETTINGS frame", CALM),
    "frames_at_once": ("frames of a connection in one turn of the loop", "it waits until others had their turn"),
    "preface_timeout": ("the first request line; preface and SETTINGS", "closed; HTTP/2: GOAWAY SETTINGS_TIMEOUT"),
    "settings_timeout": ("the acknowledgement of our SETTINGS", "GOAWAY SETTINGS_TIMEOUT"),
    "header_timeout": ("a head, or a frame other than DATA", "408; HTTP/2: GOAWAY PROTOCOL_ERROR"),
    "body_timeout": ("the next octet of a body", "408"),
    "stall_timeout": ("a reader that takes nothing", "RST_STREAM CANCEL, or closed; the engine stops"),
    "idle_timeout": ("a connection without requests", "closed; HTTP/2: GOAWAY NO_ERROR"),
    "queue_share": ("a key's or an address' share of a full queue", "429 and `Retry-After`, before tokenization"),
    "queue_full": ("the queue in front of the engine", "503 and `Retry-After`, before tokenization"),
    "queue_pushed_out": ("who waits and has most, when others come", "429 and `Retry-After`"),
    "large_queue": ("large bodies that wait to be parsed", "503"),
    "deadline": ("`Evap-Deadline-Ms` of a request, at most 7 days", "504, or an error event"),
    "ttft": ("the time to a first token", "504, or an error event"),
    "key_streams": ("requests of a key at once", "429"),
    "key_rate": ("requests and tokens of a key in a minute", "429"),
    "key_budget": ("tokens of a key in a day or month", "429; an answer that runs ends with `length`"),
}
#: Limits that no option sets: where they are.
ELSEWHERE: Final = {
    "deadline": "the request",
    "key_streams": "`max_streams` of the key",
    "key_rate": "`requests_per_minute`, `tokens_per_minute` of the key",
    "key_budget": "`tokens_per_day`, `tokens_per_month` of the key",
}
#: (what, how many, what happens): no option, because the API or an RFC says so, or because nobody needs more.
FIXED: Final = (
    ("a frame from the client (RFC 9113 6.5.2: the initial SETTINGS_MAX_FRAME_SIZE)", limits.MAX_FRAME,
     "GOAWAY FRAME_SIZE_ERROR, from its header"),
    ("octets of a chunk's size line", http1_parse.MAX_CHUNK_LINE_BYTES, "400, and closed"),
    ("octets of an HTTP/1.1 body's trailers", http1_parse.MAX_TRAILER_BYTES, "431, and closed"),
    ("octets of `X-Request-Id`", headers.MAX_REQUEST_ID_BYTES, "400"),
    ("octets of `Idempotency-Key`", operations.MAX_BYTES, "400"),
    ("levels of JSON", body.MAX_DEPTH, "400"),
    ("messages", chat.MAX_MESSAGES, "400"),
    ("tools", chat.MAX_TOOLS, "400"),
    ("octets of `tools`", chat.MAX_TOOLS_BYTES, "400"),
    ("octets of `chat_template_kwargs`", chat.MAX_TEMPLATE_ARGS_BYTES, "400"),
    ("characters of a rendered prompt", chat_template.MAX_RENDERED_CHARS, "400"),
    ("token ids in `prompt`", completions.MAX_PROMPT_IDS, "400"),
    ("stop strings", fields.MAX_STOPS, "400"),
    ("characters of a stop string", fields.MAX_STOP_CHARS, "400"),
    ("`stop_token_ids`", fields.MAX_STOP_IDS, "400"),
    ("entries of `logit_bias`", fields.MAX_BIASES, "400"),
    ("`bad_words` (vLLM)", fields.MAX_BAD_WORDS, "400"),
    ("octets of a JSON schema or grammar (vLLM)", constraints.MAX_GRAMMAR_BYTES, "400"),
    ("octets of the field that has it", fields.MAX_SCHEMA_BYTES, "400"),
    ("characters of `user`", fields.MAX_USER_CHARS, "400"),
)  # fmt: skip


def flags_of(limit: str) -> list[Option]:
    return [option for option in table() if limit in option.limits]


def tables() -> str:
    """By limit, with its options; then what is fixed."""
    lines = ["| `limit` | of what | options and defaults | beyond it |", "| --- | --- | --- | --- |"]
    for limit in (*limits.LIMITS, *dispatch.LIMITS):
        what, happens = LIMITS[limit]
        options = ", ".join(f"`{o.flag}` {shown(o)}" for o in flags_of(limit)) or ELSEWHERE[limit]
        lines.append(f"| `{limit}` | {what} | {options} | {happens} |")
    lines += ["", "Fixed, and not counted:", "", "| of what | most | beyond it |", "| --- | --- | --- |"]
    lines += [f"| {what} | {most:,} | {happens} |" for what, most, happens in FIXED]
    return "\n".join(lines)


def written() -> str:
    """The page as it should be."""
    return pages.filled(PAGE, MARK, END, tables())


if __name__ == "__main__":
    sys.exit(pages.main(sys.argv[1:], PAGE, written))
