"""What the server and an engine's process say to each other: msgpack frames over a stream socket, no I/O here.

A frame is a little-endian u32 length and a msgpack document. The supervisor sends Boot first, then Submit, Cancel,
Attach and Stop; the worker sends Progress and then Ready, LogprobBatch before the doorbell of the step that it belongs
to, X
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from hashlib import blake2s
from typing import Final, Generic, TypeVar

import msgspec

from evap.config import EngineConfig
from evap.messages import EngineInfo, GenerateRequest, SamplingParams, TokenLogprobs

#: A 10,000,000-token prompt takes 40 MB.
MAX_FRAME_BYTES: Final = 256 << 20
_LENGTH = struct.Struct("<I")


class Boot(msgspec.Struct, frozen=True, tag="boot", array_like=True):
    config: EngineConfig
    model_path: str
    ring_capacity: int
    meter: dict[str, str] | None = None  # see evap.engine.meter
    contract: str = ""


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    slot: int
    generation: int
    prompt: bytes  # int32, little-endian
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    slot: int
    generation: int


class Attach(msgspec.Struct, frozen=True, tag="attach", array_like=True):
    """One more channel, for another process. Its socket, ring memory and doorbell come with it (SCM_RIGHTS).

    linger_s: for how long the engine may outlive its parent, for what such processes wait for.
    """

    ring_capacity: int
    meter: dict[str, str] | None = None
    linger_s: float = 0.0


class Stop(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    pass


class Progress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    line: str


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    info: EngineInfo


class LogprobEntry(msgspec.Struct, frozen=True, array_like=True):
    """Belongs to the ring record with the same three numbers."""

    slot: int
    generation: int
    index: int
    logprobs: TokenLogprobs


class LogprobBatch(msgspec.Struct, frozen=True, tag="logprobs", array_like=True):
    entries: list[LogprobEntry]


class Fatal(msgspec.Struct, frozen=True, tag="fatal", array_like=True):
    """The process ends after this. `remedy` is set when a person can do something about it (a StartupError).
    outdated: the next process would say the same."""

    message: str
    remedy: str = ""
    outdated: bool = False


ToWorker = Boot | Submit | Cancel | Attach | Stop
FromWorker = Progress | Ready | LogprobBatch | Fatal

#: What both ends must agree on: the places of fields. (The ring and the counters page have versions of their own.)
CONTRACT: Final = blake2s(
    repr([(t.__name__, t.__struct_fields__) for t in (Boot, Submit, Cancel, Attach, Stop, Progress, Ready, LogprobEntry,
                                                      LogprobBatch, Fatal)]).encode(), digest_size=8,
).hexdigest()  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


def frame(message: ToWorker | FromWorker) -> bytes:
    """One message as it goes over the socket."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def pack_request(slot: int, generation: int, request: GenerateRequest) -> Submit:
    ids = request.prompt_ids
    prompt = bytes(ids) if isinstance(ids, memoryview) else array("i", ids).tobytes()
    return Submit(slot, generation, prompt, request.sampling, request.priority, request.cache_salt, request.adapter)


def unpack_request(message: Submit) -> GenerateRequest:
    prompt = array("i")
    prompt.frombytes(message.prompt)
    return GenerateRequest(
        prompt_ids=prompt.tolist(),
        sampling=message.sampling,
        priority=message.priority,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
    )


class Frames(Generic[T]):
    """Bytes in any pieces -> messages of one union."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """The messages that `data` completes. Raises ValueError for a frame that no peer of ours sends."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, at)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            end = at + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            body = bytes(memoryview(self._buffer)[at + _LENGTH.size : end])
            at = end
            yield self._decoder.decode(body)
        del self._buffer[:at]


def to_worker() -> Frames[ToWorker]:
    """Parser of the worker's end."""
    return Frames(msgspec.msgpack.Decoder(ToWorker))


def from_worker() -> Frames[FromWorker]:
    """Parser of the supervisor's end."""
    return Frames(msgspec.msgpack.Decoder(FromWorker))
