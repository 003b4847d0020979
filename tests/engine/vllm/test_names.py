"""The installed vLLM is the one this code was written for; and a vLLM that is not is told from it."""

from __future__ import annotations

import pytest

from tests.engine.vllm.live import NEEDS_VLLM

pytestmark = NEEDS_VLLM


def test_every_name_means_what_it_did() -> None:
    from evap.engine.vllm import names

    assert names.moved() == []


def test_the_installed_release_is_supported() -> None:
    from evap.engine.vllm import names

    release = tuple(int(part) for part in names.VERSION.split(".")[:2])
    assert names.SUPPORTED[0] <= release < names.SUPPORTED[1]


@pytest.mark.parametrize(
    ("table", "path", "expected", "complaint"),
    [
        ("CALLS", "vllm.v1.engine.core:EngineCore.abort_requests", ("self", "ids", "/"), "takes (self, request_ids)"),
        ("CALLS", "vllm.v1.engine.core:EngineCore.abort", (), "is gone"),
        ("CALLS", "vllm.v1.executor:Executor.get_class", ("colour",), "no longer takes colour"),
        ("FIELDS", "vllm.v1.engine:EngineCoreRequest", ("colour",), "has no field colour"),
        ("ORDER", "vllm.v1.engine:EngineCoreOutput", ("new_token_ids", "request_id"), "begins with (request_id"),
        ("VALUES", "vllm.v1.engine:FinishReason", {"STOP": 7}, "has other values for STOP"),
    ],
)
def test_what_moved_is_said(
    monkeypatch: pytest.MonkeyPatch, table: str, path: str, expected: object, complaint: str
) -> None:
    from evap.engine.vllm import names

    monkeypatch.setattr(names, table, {path: expected})
    assert [line for line in names.moved() if complaint in line]


def test_our_own_decoder_has_the_fields_in_their_places() -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, UtilityOutput

    from evap.engine.vllm import rows

    for ours, theirs in (
        (rows.Output, EngineCoreOutput),
        (rows.Outputs, EngineCoreOutputs),
        (rows.Utility, UtilityOutput),
    ):
        own = ours.__struct_fields__
        assert own == theirs.__struct_fields__[: len(own)]


def test_plain_outputs_can_be_told_from_others_in_this_releases_encoding() -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.serial_utils import MsgpackEncoder

    from evap.engine.vllm import ids
    from evap.engine.vllm.client import plain_reader

    reader = plain_reader()
    assert reader is not None
    mine = [ids.make("0f0f0f", n, n, 9) for n in range(3)]
    outputs = [EngineCoreOutput(i, [token]) for i, token in zip(mine, (5, 50_000, 500), strict=True)]
    outputs[1].finish_reason = FinishReason.LENGTH
    (encoded,) = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs, timestamp=2.5))
    found = reader.read(bytes(encoded))
    assert found is not None
    assert (found.slots.tolist(), found.tokens.tolist(), found.other_count) == ([0, 2], [5, 500], 1)
