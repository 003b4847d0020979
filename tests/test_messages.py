"""Prompts as lists and as views of C ints are alike to whoever takes them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from evap.engine.synthetic_text import SyntheticText
from evap.engine.torch import wire
from evap.messages import GenerateRequest, Prompt, SamplingParams, id_list, span

IDS = [5, 3, 9, 70_000, 4]
BOTH: list[Sequence[int]] = [IDS, memoryview(array("i", IDS))]


@pytest.mark.parametrize("ids", BOTH, ids=["list", "view"])
def test_a_prompt_of_either_kind(ids: Sequence[int]) -> None:
    assert span(ids) == (3, 70_000)
    assert span(ids[:0]) == (0, 0)
    assert Prompt.of(ids)[1:] == (3, 70_000, None)
    assert id_list(ids) == IDS
    assert isinstance(id_list(ids[1:]), list)


@pytest.mark.parametrize("ids", BOTH, ids=["list", "view"])
def test_the_torch_engine_is_sent_either_kind(ids: Sequence[int]) -> None:
    request = GenerateRequest(prompt_ids=ids, sampling=SamplingParams(max_tokens=1))
    there = wire.unpack_request(wire.pack_request(1, 2, request))
    assert there.prompt_ids == IDS


def test_a_detokenizer_looks_back_into_either_kind() -> None:
    text = SyntheticText()
    ids = text.encode("caf\u00e9")
    whole, half = ids[-1:], ids[:-1]  # the prompt ends inside a character
    found = [text.detokenizer(prompt_ids=p).push(whole) for p in (half, memoryview(array("i", half)))]
    assert found[0] == found[1]
