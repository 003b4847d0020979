"""Runs a target, `python -m fuzz.NAME --seconds 60`: with atheris (coverage-guided) where it is installed, else by
mutating the corpus.

A failing input is saved beside the corpus as `crash-...`; it belongs into the corpus once it is understood. It is also
printed, such that a log suffices: `python -m fuzz.NAME --input BASE64` tries it again.
"""

from __future__ import annotations

import argparse
import base64
import gc
import hashlib
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

Target = Callable[[bytes], None]
GUIDES = ("evap.", "fuzz.", "h2.", "h11.", "hpack.", "hyperframe.")
#: atheris itself grows by some 0.9 KB an input of chat_json (two million of them reach libFuzzer's limit of 2 GB; the
#: same inputs without it add nothing), so what is watched is a single allocation.
MEMORY = ("-rss_limit_mb=16384", "-malloc_limit_mb=2048")
CORPUS = Path(__file__).parent / "corpus"


def main(one_input: Target, name: str) -> None:
    parser = argparse.ArgumentParser(description=f"fuzz {name}")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="of the mutations, without atheris")
    parser.add_argument("--input", metavar="BASE64", help="only this one, as a failure prints it")
    options = parser.parse_args()
    if options.input is not None:
        one_input(base64.b64decode(options.input))
        return
    try:
        import atheris  # noqa: PLC0415 - optional, and it takes over the process
    except ImportError:
        mutate(one_input, name, options.seconds, random.Random(options.seed))
        return
    directory = str(CORPUS / name)
    with tempfile.TemporaryDirectory() as found:  # libFuzzer writes what it finds into the first directory
        limits = [f"-max_total_time={int(options.seconds)}", f"-artifact_prefix={directory}/", *MEMORY]
        for function in functions():
            atheris.instrument_func(function)
        atheris.Setup([sys.argv[0], *limits, found, directory], telling(one_input, name))
        atheris.Fuzz()


def functions() -> list[FunctionType]:
    """Those whose branches are to guide: of this project and of what reads bytes for it. All functions would take a
    minute to instrument."""
    return [f for f in gc.get_objects() if isinstance(f, FunctionType) and str(f.__module__).startswith(GUIDES)]


def telling(one_input: Target, name: str) -> Target:
    """The same, which says all that there is to say about a failure: atheris prints no notes, and no cause."""

    def one(data: bytes) -> None:
        try:
            one_input(data)
        except BaseException:
            text = base64.b64encode(data).decode()
            sys.stderr.write(f"{traceback.format_exc()}\nagain: python -m fuzz.{name} --input '{text}'\n")
            raise

    return one


def mutate(one_input: Target, name: str, seconds: float, chance: random.Random) -> None:
    seeds = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    end, count = time.monotonic() + seconds, 0
    one_input = telling(one_input, name)
    while time.monotonic() < end:
        data = mutated(seeds, chance)
        try:
            one_input(data)
        except BaseException:
            path = CORPUS / name / f"crash-{hashlib.sha256(data).hexdigest()[:16]}"
            path.write_bytes(data)
            sys.stderr.write(f"{name}: {path} breaks the invariant\n")
            raise
        count += 1
    sys.stderr.write(f"{name}: {count} inputs without atheris, no violation\n")


def mutated(seeds: list[bytes], chance: random.Random) -> bytes:
    """A seed with a few edits: bytes replaced, cut, doubled, or taken from another seed."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at, size = chance.randint(0, len(data)), chance.choice((0, 1, 1, 2, 4, 16))
        other = chance.choice(seeds)
        start = chance.randint(0, len(other))
        data[at : at + size] = chance.choice(
            (b"", chance.randbytes(chance.randint(1, 3)), other[start : start + chance.randint(1, 40)],
             bytes(data[at : at + size]) * 2, bytes([chance.choice(b" \t\r\n:;,0fG\0\x7f\xff")])),
        )  # fmt: skip
    return bytes(data)
