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


def test_plain_outputs_have_a_rest_that_nothing_else_looks_like() -> None:
    import msgspec
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.serial_utils import MsgpackEncoder

    from evap.engine.vllm.rows import rest_of_plain

    (encoded,) = MsgpackEncoder().encode(EngineCoreOutput("x", [1]))
    assert len(rest_of_plain(bytes(encoded), msgspec.msgpack.encode(["x", [1]]))) > 10
