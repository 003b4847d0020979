"""The table of options: three sources, one meaning, and one clear line for everything that is wrong."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap import options
from evap.config import Config, ProtocolConfig
from evap.errors import StartupError


def flags(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    options.add_arguments(parser)
    return vars(parser.parse_args(argv))


def load(*argv: str, **env: str) -> Config:
    return options.load(flags(*argv), env).config


def refused(*argv: str, **env: str) -> StartupError:
    with pytest.raises(StartupError) as caught:
        load(*argv, **env)
    assert "\n" not in caught.value.message
    return caught.value


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "evap.toml"
    path.write_text(text)
    return str(path)


def test_nothing_given_is_the_default() -> None:
    assert load() == Config()
    assert options.load(flags(), {}).origins == {}


def test_every_field_of_every_struct_is_an_option_with_help() -> None:
    config = Config()
    names = [f.name for part in dataclasses.fields(config) for f in dataclasses.fields(getattr(config, part.name))]
    assert [o.name for o in options.table()] == names
    assert all(o.help for o in options.table())


def test_defaults_keep_their_own_bounds_and_choices() -> None:
    for option in options.table():
        assert option.read(option.default, option.flag) == option.default


def example(option: options.Option) -> tuple[str, options.Value]:
    """A legal value that is not the default, as text and as a value."""
    if option.name == "rope_scaling":
        return '{"factor":2}', '{"factor":2}'
    if option.choices:
        value = next(c for c in option.choices if c != option.default)
        return value, value
    if option.kind is bool:
        return str(not option.default).lower(), not option.default
    if option.kind in (int, float):
        bounded = [b for b in (option.high, option.low, option.default + 1) if b is not None and b != option.default]  # type: ignore[operator]
        value = option.kind(bounded[0])
        return str(value), value
    return ("a,b", ("a", "b")) if option.kind == tuple[str, ...] else ("some text", "some text")


def as_flags(option: options.Option, value: options.Value) -> list[str]:
    if isinstance(value, bool):
        return [option.flag if value else "--no-" + option.flag[2:]]
    return [word for one in (value if isinstance(value, tuple) else (value,)) for word in (option.flag, str(one))]


@pytest.mark.parametrize("option", [o for o in options.table() if not o.name.startswith("tls")], ids=lambda o: o.name)
def test_flag_environment_and_toml_mean_the_same(option: options.Option, tmp_path: Path) -> None:
    text, value = example(option)
    quoted = (
        text if option.kind in (int, float, bool) else repr(list(value)) if isinstance(value, tuple) else repr(text)
    )
    file = toml(tmp_path, f"[{option.part}]\n{option.name} = {quoted}\n")
    by_flag = flags(*as_flags(option, value))
    for given_by in (
        options.load(by_flag, {}),
        options.load({}, {option.env: text}),
        options.load({"config": file}, {}),
    ):
        assert getattr(getattr(given_by.config, option.part), option.name) == value
        assert list(given_by.origins) == [option.name]


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, "[server]\nport = 1\nhost = '::1'\nlog_level = 'error'\n")
    config = load("--config", file, "--port", "3", EVAP_PORT="2", EVAP_HOST="0.0.0.0").server
    assert (config.port, config.host, config.log_level) == (3, "0.0.0.0", "error")
    assert load(EVAP_CONFIG=file).server.port == 1


def test_the_unit_may_be_left_out_everywhere(tmp_path: Path) -> None:
    assert load("--drain-timeout", "5").server.drain_timeout_s == 5
    assert load("--stream-buffer", "4096").protocol.stream_buffer_bytes == 4096
    assert load(EVAP_STALL_TIMEOUT="5").protocol.stall_timeout_s == 5
    assert load("--config", toml(tmp_path, "[engine]\ntoken_cache = 1")).engine.token_cache_mb == 1


def test_a_name_and_its_short_form_together_are_a_mistake() -> None:
    assert "same option" in refused(EVAP_DRAIN_TIMEOUT="1", EVAP_DRAIN_TIMEOUT_S="2").message


def test_model_is_positional_or_a_flag() -> None:
    assert load("org/name").engine.model == load("--model", "org/name").engine.model == "org/name"
    assert "same option" in refused("a", "--model", "b").message


@pytest.mark.parametrize(
    ("argv", "env", "said", "remedy"),
    [
        (["--port", "x"], {}, "--port: expected a whole number", "--port N"),
        (["--port", "70000"], {}, "70000 is out of range (0..65535)", "--port N"),
        (["--port", "1.5"], {}, "expected a whole number", ""),
        (["--drain-timeout-s", "nan"], {}, "expected a number", "SECONDS"),
        (["--drain-timeout-s", "inf"], {}, "expected a number", "SECONDS"),
        (["--drain-timeout-s", "-1"], {}, "at least 0", "SECONDS"),
        (["--ttft-timeout-s", "1e300"], {}, "1e300 is too large (at most 1000000000)", "SECONDS"),
        (["--max-body-bytes", "9" * 17], {}, "9 is too large (at most 9007199254740992)", "BYTES"),
        (["--max-body-bytes", "9" * 400], {}, "is too large (at most 9007199254740992)", "BYTES"),
        (["--engine", "tgi"], {}, "'tgi' is not one of auto, torch, vllm, synthetic", ""),
        (["--tls-cert", "a.pem"], {}, "both a certificate and its key", "--tls-key"),
        (["--tls-key", "a.pem"], {}, "both a certificate and its key", "--tls-cert"),
        (["--tls", "self-signed", "--tls-cert", "a", "--tls-key", "b"], {}, "exclude each other", ""),
        (["--rope-scaling", "{"], {}, "not a JSON object", "rope_type"),
        (["--rope-scaling", "4"], {}, "not a JSON object", "rope_type"),
        ([], {"EVAP_PROT": "1"}, "unknown environment variable EVAP_PROT", "EVAP_PORT"),
        ([], {"EVAP_port": "1"}, "unknown environment variable EVAP_port", "EVAP_PORT"),
        ([], {"EVAP_XYZZY": "1"}, "unknown environment variable EVAP_XYZZY", "--help"),
        ([], {"EVAP_PORT": ""}, "EVAP_PORT: expected a whole number", ""),
        ([], {"EVAP_LOG_LEVEL": "loud"}, "EVAP_LOG_LEVEL: 'loud' is not one of", ""),
        (["--config", "/nonexistent.toml"], {}, "cannot read /nonexistent.toml: No such file", "--config"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(argv: list[str], env: dict[str, str], said: str, remedy: str) -> None:
    error = refused(*argv, **env)
    assert said in error.message
    assert remedy in error.remedy


@pytest.mark.parametrize(
    ("text", "said", "remedy"),
    [
        ("port = 1", "unknown table or key port", "write it below [server]"),
        ("[sever]\nport = 1", "unknown table or key sever", "did you mean server?"),
        ("[server]\nprot = 1", "unknown option prot in [server]", "did you mean port?"),
        ("[server]\nmax_body_bytes = 1", "unknown option max_body_bytes in [server]", "it belongs to [protocol]"),
        ("server = 1", "server is a table", "[server]"),
        ("[server]\nport = true", "[server] port: expected a whole number", ""),
        ("[server]\nport = 1.5", "[server] port: expected a whole number", ""),
        ("[server]\nport = [1]", "[server] port: expected a whole number", ""),
        ("[server]\nhost = 1", "[server] host: expected text", ""),
        ("[server]\ndrain_timeout_s = inf", "expected a number", ""),
        ("[server]\ndrain_timeout_s = false", "expected a number", ""),
        ("[server", "is not valid TOML", ""),
        ("[server]\ndrain_timeout = 1\ndrain_timeout_s = 1", "are the same option", "--drain-timeout-s"),
    ],
)
def test_a_file_is_held_to_the_table(tmp_path: Path, text: str, said: str, remedy: str) -> None:
    error = refused("--config", toml(tmp_path, text))
    assert said in error.message
    assert remedy in error.remedy


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "evap.toml"
    path.write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in refused("--config", str(path)).message
    assert "Is a directory" in refused("--config", str(tmp_path)).message


def test_whole_numbers_serve_as_seconds_in_a_file(tmp_path: Path) -> None:
    value = load("--config", toml(tmp_path, "[server]\ndrain_timeout_s = 3")).server.drain_timeout_s
    assert value == 3.0
    assert isinstance(value, float)


def test_reserved_variables_are_left_alone() -> None:
    assert load(EVAP_CACHE_DIR="/x", EVAP_TEST_ANYTHING="1", PATH="/bin") == Config()


@given(st.text(max_size=200))
def test_any_text_gives_a_value_or_a_short_startup_error(text: str) -> None:
    for option in options.table():
        try:
            value = option.read(text, option.flag)
        except StartupError as e:
            value = e.message[:300]
            assert len(value) == len(str(e))  # noqa: PT017  # either outcome is right
        assert isinstance(value, (bool, int, float, str, tuple))


def make(kind: Any, **fields: Any) -> options.Option:
    settings: dict[str, Any] = {"default": "", "help": "h", "choices": (), "low": None, "high": None, **fields}
    return options.Option(part="server", name=settings.pop("name", "x"), kind=kind, **settings)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("On", True), ("1", True), ("no", False), ("0", False)])
def test_truth_as_text(text: str, value: bool) -> None:
    assert make(bool).read(text, "w") is value


def test_booleans_and_lists_are_strict() -> None:
    switch, several = make(bool), make(tuple[str, ...])
    assert switch.read(True, "w") is True
    assert several.read("a,b", "w") == several.read('["a","b"]', "w") == several.read(["a", "b"], "w") == ("a", "b")
    assert several.read('["a,b"]', "w") == ("a,b",)
    for option, bad in (
        (switch, "maybe"),
        (switch, 1),
        (several, '["a'),
        (several, "[1]"),
        (several, [1]),
        (several, 1),
    ):
        with pytest.raises(StartupError):
            option.read(bad, "w")


def test_names_and_units() -> None:
    option = make(float, name="idle_timeout_s", low=0.5)
    assert (option.flag, option.env) == ("--idle-timeout-s", "EVAP_IDLE_TIMEOUT_S")
    assert (option.alias, option.metavar, option.bounds()) == ("idle_timeout", "SECONDS", "at least 0.5")
    assert make(float, name="resets_per_s").alias is None
    assert make(int, high=9).bounds() == "at most 9"


@dataclasses.dataclass(frozen=True)
class NotSimple:
    size: int | None = None


@dataclasses.dataclass(frozen=True)
class WithNotSimple:
    server: NotSimple = NotSimple()


DEFAULT = ProtocolConfig()


@dataclasses.dataclass(frozen=True)
class Twice:
    one: ProtocolConfig = DEFAULT
    two: ProtocolConfig = DEFAULT


def test_a_field_that_cannot_be_an_option_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "Config", WithNotSimple)
    with pytest.raises(TypeError, match=r"NotSimple\.size is not an option"):
        options.table.__wrapped__()


def test_two_parts_may_not_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "Config", Twice)
    with pytest.raises(TypeError, match="unique"):
        options.table.__wrapped__()


def test_help_names_every_option_its_unit_and_default() -> None:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for option in options.table():
        assert f"{option.flag} " in text.replace(",", " ")
    assert "--max-body-bytes BYTES" in text
    assert "(default 67108864 = 64 MiB)" in text
    assert "--drain-timeout " not in text  # accepted, not shown


def test_the_queue_in_requests_may_be_named_without_its_unit() -> None:
    assert load("--max-queued", "7").engine.max_queued_requests == 7
    assert load(EVAP_MAX_QUEUED="7").engine.max_queued_requests == 7
