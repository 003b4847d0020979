"""What a parent and its loop processes say to each other arrives as it was."""

from __future__ import annotations

import asyncio

from evap import between
from evap.config import Config, EngineConfig, MeterConfig
from evap.messages import EngineInfo
from evap.pipe import pair
from tests.test_pipe import End

INFO = EngineInfo(engine="torch", device="cpu", dtype="float32", max_model_len=99, vocab_size=99, max_running=4)


def test_everything_that_is_said_arrives_as_it_was() -> None:
    config = Config(engine=EngineConfig(vllm_arg=("a=b",), synthetic_step_ms=0), meter=MeterConfig(data_dir="/x"))
    start = between.Start(1, 2, config, ("127.0.0.1", 80), [4, 5], 6, 1024, 7, 8, b"secret", (b"cert", b"key"))
    told = [start, between.Engine("ready", "line"), between.Signal(15), between.Behind("why"),
            between.Question(1, "usage", "id"), between.Answer(2, b"data")]  # fmt: skip
    asked = [between.Up("m", True, INFO), between.Want({"page": "x"}), between.Want(None),
             between.Question(3, "metrics"), between.Answer(4, b"")]  # fmt: skip

    async def main() -> None:
        ours, theirs = pair()
        parent, child = End(ours, between.FromChild), End(theirs, between.ToChild)
        for message in told:
            parent.pipe.send(message)
        for answer in asked:
            child.pipe.send(answer)
        await child.until(len(told))
        await parent.until(len(asked))
        assert child.heard == told
        assert parent.heard == asked
        parent.pipe.close()
        await child.until(99)
        assert (child.ended, parent.ended) == (1, 0)
        child.pipe.send(between.Want(None))  # to nobody

    asyncio.run(main())
