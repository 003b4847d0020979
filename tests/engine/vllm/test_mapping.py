"""What reaches the engine: complete, or refused. The engine lives through whatever is thrown at it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evap.errors import EvapError, InvalidRequest, StartupError
from evap.messages import Finish, GenerateRequest, SamplingParams
from tests.engine.vllm.live import NEEDS_VLLM, VOCAB, Live, ask

pytestmark = NEEDS_VLLM

DEEP: Any = {}
_level = DEEP
for _ in range(3000):
    _level["properties"] = {"a": {}}
    _level = _level["properties"]["a"]


def params(live: Live, **fields: Any) -> Any:
    request = ask(**fields)
    return live.replica._mapper.params(request.sampling, request.prompt_ids)


def test_plain_parameters_arrive(core: Live) -> None:
    found = params(
        core, n=9, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=7, presence_penalty=1.0, frequency_penalty=-1.0,
        repetition_penalty=1.5, logit_bias={3: 4.0}, stop_token_ids=(9,), min_tokens=2, logprobs=3, ignore_eos=False,
    )  # fmt: skip
    assert (found.max_tokens, found.temperature, found.top_p, found.top_k, found.min_p) == (9, 0.5, 0.9, 5, 0.1)
    assert (found.seed, found.presence_penalty, found.frequency_penalty) == (7, 1.0, -1.0)
    assert (found.repetition_penalty, found.logit_bias, found.min_tokens, found.logprobs) == (1.5, {3: 4.0}, 2, 3)
    assert set(found.stop_token_ids) == {9}
    assert found.eos_token_id == 1
    assert found.all_stop_token_ids == {1, 9}
    assert not found.detokenize


def test_ignore_eos_leaves_no_eos(core: Live) -> None:
    assert params(core, ignore_eos=True).eos_token_id is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "empty"),
    ({"prompt": [VOCAB]}, "vocabulary"),
    ({"prompt": [-1]}, "vocabulary"),
    ({"prompt": [5] * 2048}, "context"),
    ({"logit_bias": {VOCAB: 1.0}}, "vocabulary"),
    ({"logit_bias": {-5: 1.0}}, "vocabulary"),
    ({"stop_token_ids": (VOCAB,)}, "vocabulary"),
    ({"stop_token_ids": tuple(range(1500))}, "entries"),
    ({"logprobs": 21}, "logprobs"),
    ({"min_tokens": 9, "n": 3}, "min_tokens"),
    ({"temperature": math.nan}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"n": 0}, "max_tokens"),
    ({"extra": {"colour": 1}}, "not supported"),
    ({"extra": {"allowed_token_ids": []}}, "allowed_token_ids"),
    ({"extra": {"allowed_token_ids": [VOCAB]}}, "vocabulary"),
    ({"extra": {"allowed_token_ids": [True]}}, "allowed_token_ids"),
    ({"extra": {"bad_words": ["a"] * 65}}, "bad_words"),
    ({"extra": {"bad_words": [""]}}, "bad_words"),
    ({"extra": {"bad_words": "word"}}, "bad_words"),
    ({"extra": {"prompt_logprobs": 21}}, "prompt_logprobs"),
    ({"extra": {"prompt_logprobs": 1.5}}, "prompt_logprobs"),
    ({"extra": {"repetition_detection": {"colour": 1}}}, "repetition_detection"),
    ({"extra": {"response_format": {"type": "colour"}}}, "response_format"),
    ({"extra": {"response_format": {"type": "json_schema"}}}, "schema"),
    ({"extra": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "colour"}}}}}, ""),
    ({"extra": {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}}}, "nested"),
    ({"extra": {"guided_json": "{"}}, "JSON schema"),
    ({"extra": {"guided_json": "[" * 100_000}}, "JSON schema"),
    ({"extra": {"guided_json": {"enum": ["x" * 100_000]}}}, "larger"),
    ({"extra": {"guided_regex": "(" * 3000}}, "compiled"),
    ({"extra": {"guided_regex": "(unclosed"}}, ""),
    ({"extra": {"guided_regex": "a\0b"}}, "compiled"),
    ({"extra": {"guided_regex": "a", "guided_choice": ["b"]}}, "exclude"),
    ({"extra": {"guided_choice": []}}, "texts"),
    ({"extra": {"guided_grammar": ""}}, "text"),
    ({"extra": {"guided_grammar": "root ::= missing_rule"}}, ""),
    ({"extra": {"structured_outputs": {"colour": 1}}}, "unknown"),
    ({"extra": {"structured_outputs": {"whitespace_pattern": "x"}}}, "no constraint"),
    ({"extra": {"structured_outputs": {"json_object": False}}}, "json_object"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_what_would_hurt_is_refused_before_the_engine(core: Live, fields: dict[str, Any], message: str) -> None:
    request = ask(**fields)
    before = core.replica.running
    with pytest.raises(InvalidRequest) as caught:
        core.do(lambda: core.replica.submit(1060, 60_001, request))
    assert message in caught.value.message
    assert len(caught.value.message) < 400
    assert core.replica.running == before


def test_the_engine_lives_after_all_that(core: Live) -> None:
    assert len(core.generate(ask(n=4))[0].tokens) == 4


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        {"guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"guided_json": '{"type": "boolean"}'},
        {"guided_regex": "[ab]{3}"},
        {"guided_choice": ["yes", "no"]},
        {"guided_grammar": 'root ::= "yes" | "no"'},
        {"structured_outputs": {"regex": "x+", "disable_any_whitespace": True}},
        {"bad_words": ["self", "import"]},
        {"allowed_token_ids": [5, 6, 7]},
        {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_what_vllm_can_do_runs(core: Live, extra: dict[str, Any]) -> None:
    (result,) = core.generate(ask(n=6, extra=extra, ignore_eos=False))
    assert result.finish in (Finish.STOP, Finish.LENGTH)
    if "allowed_token_ids" in extra:
        assert set(result.tokens) <= {5, 6, 7}


def test_a_checked_grammar_is_remembered(core: Live) -> None:
    mapper = core.replica._mapper
    first = mapper._structured({"regex": "abc"})
    assert mapper._structured({"regex": "abc"}) is first


def test_a_broken_adapter_option() -> None:
    from evap.engine.vllm.mapping import adapters

    for lora in (("x",), ("=p",), ("x=/nowhere",)):
        with pytest.raises(StartupError):
            adapters(lora)


def test_an_adapter_that_is_not_loaded(core: Live) -> None:
    with pytest.raises(EvapError, match="not loaded"):
        core.do(lambda: core.replica.submit(60, 60_001, ask(adapter="mine")))


ids = st.integers(-(2**40), 2**40) | st.integers(0, VOCAB - 1)
numbers = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 1.0, 2.0])
leaves = st.none() | st.booleans() | ids | numbers | st.text(max_size=8)
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
#: nearly JSON schemas: what compilers of grammars get to see
schemas = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "number", "boolean", "null", "colour"])})
    | st.fixed_dictionaries({"enum": st.lists(leaves, max_size=3)})
    | st.fixed_dictionaries({"type": st.just("string"), "pattern": st.text("ab()[]*+?{1,}\\^$|", max_size=8)}),
    lambda inner: (
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.text(max_size=4), inner, max_size=3)},
            optional={"required": st.lists(st.text(max_size=4), max_size=2), "additionalProperties": inner | leaves},
        )
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner}, optional={"minItems": ids, "maxItems": ids})
        | st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)})
        | st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/$defs/a", "http://x/y"]), "$defs": trees})
    ),
    max_leaves=6,
)
constraints = st.one_of(
    st.fixed_dictionaries({"json": schemas}),
    st.fixed_dictionaries({"regex": st.text("ab()[]*+?{1,}\\^$|.", max_size=12)}),
    st.fixed_dictionaries({"choice": st.lists(st.text(max_size=6), max_size=4)}),
    st.fixed_dictionaries({"grammar": st.text('root:=" ab|()\n', max_size=30)}),
    st.fixed_dictionaries({"structural_tag": st.text(max_size=10) | trees}),
)
near = st.one_of(
    constraints.map(lambda c: {"structured_outputs": c}),
    schemas.map(lambda s: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}}),
    st.lists(st.text(max_size=6), max_size=4).map(lambda words: {"bad_words": words}),
    st.lists(ids, max_size=4).map(lambda listed: {"allowed_token_ids": listed}),
    st.integers(-2, 30).map(lambda n: {"prompt_logprobs": n}),
)
extras = near | st.dictionaries(
    st.sampled_from(
        [
            "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
            "bad_words", "allowed_token_ids", "prompt_logprobs", "repetition_detection", "colour",
        ]
    ),
    trees | st.just({"type": "object"}) | st.just("[a-c]+") | st.just(["x", "y"]),
    max_size=2,
)  # fmt: skip
hostile = st.builds(
    lambda prompt, outer, fields: GenerateRequest(prompt_ids=prompt, sampling=SamplingParams(**fields), **outer),
    st.lists(ids, max_size=6) | st.just([5, 6]),
    st.fixed_dictionaries(
        {},
        optional={
            "priority": st.integers(-(2**31), 2**31 - 1), "cache_salt": st.text(max_size=20),
            "adapter": st.sampled_from(["", "mine"]),
        },
    ),
    st.fixed_dictionaries(
        {"max_tokens": st.integers(-1, 5)},
        optional={
            "temperature": numbers, "top_p": numbers, "top_k": st.integers(-2, 2**33), "min_p": numbers, "seed": ids,
            "presence_penalty": numbers, "frequency_penalty": numbers, "repetition_penalty": numbers,
            "logit_bias": st.dictionaries(ids, numbers, max_size=3),
            "stop_token_ids": st.lists(ids, max_size=3).map(tuple),
            "min_tokens": st.integers(-1, 6), "logprobs": st.integers(-2, 30), "extra": extras,
        },
    ),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests=st.lists(hostile, min_size=1, max_size=4))
def test_the_engine_survives_hostile_requests(core: Live, requests: list[GenerateRequest]) -> None:
    """Each is refused with an error of the client's, or ends; the engine that served the first serves the last."""
    pid = core.replica.pids()
    accepted = []
    for request in requests:
        try:
            accepted += core.submit([request])
        except EvapError:
            continue
        core.results(accepted)
        accepted = []
    assert core.replica.pids() == pid
    assert len(core.generate(ask(n=2))[0].tokens) == 2
