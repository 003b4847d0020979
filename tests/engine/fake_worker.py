"""A worker process without torch: the real worker's loop round an engine that does what it is told.

The model path says how it starts, the first prompt token what becomes of a request.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from evap.engine.meter import Spec
from evap.engine.torch import wire
from evap.engine.torch.records import Records
from evap.engine.torch.worker import main
from evap.errors import StartupError
from evap.messages import HAS_LOGPROBS, META, NO_TOKEN, EngineInfo, Finish, GenerateRequest, TokenLogprobs

COUNT, EXIT, HANG, RAISE, OUT_OF_MEMORY, FOREVER, LONG = 1, 2, 3, 4, 5, 6, 7
INFO = EngineInfo(engine="torch", device="cpu", dtype="float32", max_model_len=99, vocab_size=99, max_running=4)


class FakeEngine:
    """COUNT counts 10, 11, 12 ... up to max_tokens, one token a step; the others end the process in their way."""

    info = INFO

    def __init__(self) -> None:
        self.steps = 0
        self._running: dict[tuple[int, int], tuple[GenerateRequest, int]] = {}
        self._out = Records()

    @property
    def idle(self) -> bool:
        return not self._running and not len(self._out)

    @property
    def bound(self) -> int:
        return 2 * len(self._running)

    @property
    def kv_usage(self) -> float:
        return len(self._running) / 8

    def submit(self, slot: int, generation: int, request: GenerateRequest) -> None:
        self._running[slot, generation] = (request, 0)
        self._out.add(slot, generation, 0, 0, META | NO_TOKEN)

    def cancel(self, slot: int, generation: int) -> None:
        found = self._running.pop((slot, generation), None)
        if found is not None:
            self._out.add(slot, generation, 0, found[1], Finish.CANCELLED | NO_TOKEN)

    def beats(self, beat: Callable[[], None]) -> None:
        self._beat = beat

    def attach(self, base: int, meter: Spec | None) -> None: ...
    def detach(self, base: int) -> None: ...

    def step(self) -> Records:
        self.steps += 1
        for (slot, generation), (request, done) in list(self._running.items()):
            self._obey(request.prompt_ids[0])
            last = done + 1 == request.sampling.max_tokens
            flags = int(Finish.LENGTH) if last else 0
            if request.sampling.logprobs is not None:
                flags |= HAS_LOGPROBS
                self._out.logprobs.append(wire.LogprobEntry(slot, generation, done, TokenLogprobs(-float(done))))
            self._out.add(slot, generation, 10 + done, done, flags)
            self._running[slot, generation] = (request, done + 1)
            if last:
                del self._running[slot, generation]
        out, self._out = self._out, Records()
        return out

    def _obey(self, what: int) -> None:
        if what == EXIT:
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == HANG:
            time.sleep(3600)
        elif what == LONG:  # a step of many layers
            for _ in range(10):
                time.sleep(0.02)
                self._beat()
        elif what == RAISE:
            raise ValueError("a bug")
        elif what == OUT_OF_MEMORY:
            raise MemoryError

    def pace(self, elapsed_ns: int) -> None:
        assert elapsed_ns >= 0

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def relieve(self) -> None:
        (slot, generation), (_, done) = self._running.popitem()
        self._out.add(slot, generation, 0, done, Finish.ERROR | NO_TOKEN)


def build(boot: wire.Boot, progress: Callable[[str], None]) -> FakeEngine:
    progress("fake progress")
    name = Path(boot.model_path).name
    if name == "refuse":
        raise StartupError("no such model", remedy="fetch it")
    if name == "die":
        os._exit(9)
    return FakeEngine()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build))
