"""The one table of options: every field of the structs in `config.py`, as flag, EVAP_* variable and TOML key.

A value comes from the first of: flag, environment, TOML file, default. Unknown names are refused with the nearest
known one, bad values with the place they came from. An option whose name ends in a unit may be given without it
(`--drain-timeout 5` is `--drain-timeout-s 5`), in all three places.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, get_type_hints

from evap.config import Config, opt
from evap.errors import StartupError, echo

__all__ = ["Option", "Settings", "add_arguments", "load", "opt", "table"]

Value = bool | int | float | str | tuple[str, ...]
#: option name -> (value, where it was given)
Given = dict[str, tuple[Value, str]]

#: EVAP_* variables that are not options: name -> what reads it. A name that ends in "_" stands for all that start so.
RESERVED_ENV: Final = {
    "EVAP_CONFIG": "the TOML file, when --config is not given",
    "EVAP_CACHE_DIR": "where models are kept (default ~/.cache/evap)",
    "EVAP_TEST_": "the test-suite's own switches",
}

#: Largest numbers of any option: seconds whose nanoseconds have room in 62 bits, and what every format keeps exact.
_LARGEST: Final = {float: 1e9, int: 1 << 53}

_LIST: Final = tuple[str, ...]
_KINDS: Final = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", _LIST: "a list of texts",
}  # fmt: skip
_UNITS: Final = (
    ("_per_s", ""), ("_requests", "N"), ("_ms", "MS"), ("_s", "SECONDS"), ("_mb", "MB"), ("_bytes", "BYTES"),
)  # fmt: skip
_TRUTH: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)

#: Titles of the help's groups, in the order they are shown: a part, or the options of a part with a common prefix.
_GROUPS: Final = {
    ("engine", ""): "Model and engine",
    ("server", ""): "Listening, logging, shutting down",
    ("engine", "synthetic_"): "Synthetic engine (no model: for load tests)",
    ("engine", "vllm_"): "vLLM engine",
    ("meter", ""): "Metering",
    ("fleet", ""): "Fleet",
    ("protocol", ""): "Limits and deadlines of the wire",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one struct. `kind` is its type, `low` and `high` are inclusive bounds."""

    part: str
    name: str
    kind: Any
    default: Value
    help: str
    choices: tuple[str, ...]
    low: float | None
    high: float | None
    #: names in evap_limit_total
    limits: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return "EVAP_" + self.name.upper()

    @property
    def alias(self) -> str | None:
        """The name without its unit."""
        for suffix, unit in _UNITS:
            if self.name.endswith(suffix):
                return self.name.removesuffix(suffix) if unit else None
        return None

    @property
    def metavar(self) -> str:
        if self.choices:
            return "{" + ",".join(c for c in self.choices if c) + "}"
        unit = next((unit for suffix, unit in _UNITS if self.name.endswith(suffix)), "")
        return unit or ("N" if self.kind in (int, float) else "TEXT")

    def read(self, raw: object, where: str) -> Value:
        """`raw` (text from a flag or the environment, any type from TOML) as a checked value, or StartupError."""
        value = self._convert(raw)
        if value is None:
            raise StartupError(f"{where}: expected {_KINDS[self.kind]}, got {echo(raw)!r}", remedy=self._usage())
        if self.choices and value not in self.choices:
            names = ", ".join(c for c in self.choices if c)
            raise StartupError(f"{where}: {echo(value)!r} is not one of {names}", remedy=self._usage())
        if value > (most := _LARGEST.get(self.kind, value)):  # type: ignore[operator]
            raise StartupError(f"{where}: {echo(raw)} is too large (at most {most:.0f})", remedy=self._usage())
        if isinstance(value, (int, float)) and not self._in_bounds(value):
            raise StartupError(f"{where}: {value} is out of range ({self.bounds()})", remedy=self._usage())
        return value

    def bounds(self) -> str:
        if self.low is not None and self.high is not None:
            return f"{_plain(self.low)}..{_plain(self.high)}"
        if self.low is not None:
            return f"at least {_plain(self.low)}"
        return f"at most {_plain(self.high)}" if self.high is not None else ""

    def _in_bounds(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def _usage(self) -> str:
        return f"{self.flag} {self.metavar}  ({self.help})"

    def _convert(self, raw: object) -> Value | None:
        if isinstance(raw, str):
            return _from_text(self.kind, raw)
        if self.kind is float and isinstance(raw, (int, float)) and not isinstance(raw, bool):
            return float(raw) if math.isfinite(raw) else None
        if self.kind == _LIST or self.kind is str:
            whole = isinstance(raw, (list, tuple)) and all(isinstance(item, str) for item in raw)
            return tuple(raw) if whole and self.kind is not str else None  # type: ignore[arg-type]
        return raw if type(raw) is self.kind else None  # type: ignore[return-value]  # bool is not an int here


def _plain(number: float | None) -> str:
    return f"{number:g}" if number is not None and number != int(number) else str(int(number or 0))


def _from_text(kind: Any, text: str) -> Value | None:
    if kind is str:
        return text
    if kind is bool:
        return _TRUTH.get(text.strip().lower())
    try:
        if kind is int:
            return int(text)
        if kind is float:
            return float(text) if math.isfinite(float(text)) else None
        if text.lstrip().startswith("["):  # texts that contain commas are given as a JSON list
            items = json.loads(text)
            return tuple(items) if all(isinstance(item, str) for item in items) else None
    except ValueError:
        return None
    return tuple(item for item in text.split(",") if item)


@cache
def table() -> tuple[Option, ...]:
    """Every option. Raises TypeError for a field that cannot be one, so that a mistake fails at the first start."""
    found: list[Option] = []
    for part in fields(Config):
        struct = get_type_hints(Config)[part.name]
        for field, kind in zip(fields(struct), get_type_hints(struct).values(), strict=True):
            if kind not in _KINDS or field.default is MISSING or "help" not in field.metadata:
                raise TypeError(f"config.{struct.__name__}.{field.name} is not an option: use opt() and a simple type")
            found.append(Option(part.name, field.name, kind, field.default, **field.metadata))
    names = [name for option in found for name in (option.name, option.alias) if name]
    if doubles := {name for name in names if names.count(name) > 1}:
        raise TypeError(f"option names must be unique across parts: {sorted(doubles)}")
    return tuple(found)


@cache
def _by_name() -> dict[str, Option]:
    return {name: option for option in table() for name in (option.name, option.alias) if name}


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration, and where each value that is not a default was given."""

    config: Config
    origins: Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --config and one flag per option, in groups. Values stay text: `load` reads and checks them."""
    parser.add_argument("MODEL", nargs="?", help="the same as --model: " + _by_name()["model"].help)
    parser.add_argument(
        "--config", metavar="FILE.toml", help="options from a file: [engine] model = ..., [server] port = ..."
    )
    groups = {key: parser.add_argument_group(title) for key, title in _GROUPS.items()}
    for option in table():
        prefixes = [key for key in _GROUPS if key[0] == option.part and option.name.startswith(key[1])]
        _add_argument(groups[max(prefixes, key=lambda key: len(key[1]))], option)


def _add_argument(group: argparse._ArgumentGroup, option: Option) -> None:
    text = option.help.replace("%", "%%")
    if option.default not in ("", ()) and "default" not in text:
        text += f" (default {shown(option)})"
    settings: dict[str, Any] = {"dest": option.name, "default": None}
    if option.kind is bool:
        settings["action"] = argparse.BooleanOptionalAction
    else:
        settings.update(metavar=option.metavar, action="append" if option.kind == _LIST else "store")
    group.add_argument(option.flag, help=text, **settings)
    if option.alias:
        group.add_argument("--" + option.alias.replace("_", "-"), help=argparse.SUPPRESS, **settings)


def shown(option: Option) -> str:
    """The default, as people read it."""
    value = option.default
    if option.name.endswith("_bytes") and isinstance(value, int) and value:
        power = next(p for p in (30, 20, 10, 0) if value % (1 << p) == 0 and value >= 1 << p)
        return f"{value}" + {30: " = {} GiB", 20: " = {} MiB", 10: " = {} KiB", 0: ""}[power].format(value >> power)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def load(flags: Mapping[str, Any], env: Mapping[str, str]) -> Settings:
    """The configuration from parsed flags (see `add_arguments`), the environment and the TOML file that either names.

    Raises StartupError, in one line with a remedy, for anything unknown, malformed, out of range or contradictory.
    """
    file = flags.get("config") or env.get("EVAP_CONFIG")
    given: Given = {}
    for source in (_from_toml(Path(file)) if file else {}, _from_env(env), _from_flags(flags)):
        given.update(source)
    config = Config()
    for part in fields(Config):
        mine = {o.name: given[o.name][0] for o in table() if o.part == part.name and o.name in given}
        config = replace(config, **{part.name: replace(getattr(config, part.name), **mine)})
    _check(config)
    return Settings(config, {name: where for name, (_, where) in given.items()})


def _collect(items: Iterable[tuple[str, object, str]]) -> Given:
    """(name or alias, raw value, where) of one source -> checked values; a name and its alias may not both be given."""
    given: Given = {}
    for name, raw, where in items:
        option = _by_name()[name]
        if option.name in given:
            raise StartupError(f"{where} and {given[option.name][1]} are the same option", remedy=f"keep {option.flag}")
        given[option.name] = (option.read(raw, where), where)
    return given


def _from_flags(flags: Mapping[str, Any]) -> Given:
    given = [(o.name, flags[o.name], o.flag) for o in table() if flags.get(o.name) is not None]
    if flags.get("MODEL") is not None:
        given.append(("model", flags["MODEL"], "MODEL"))
    return _collect(given)


def _from_env(env: Mapping[str, str]) -> Given:
    def known() -> Iterator[tuple[str, object, str]]:
        for variable in sorted(env):
            if not variable.startswith("EVAP_") or _reserved(variable):
                continue
            name = variable.removeprefix("EVAP_").lower()
            if name not in _by_name() or variable != variable.upper():
                near = _nearest(name, _by_name())  # without the prefix, which would make everything look alike
                remedy = f"did you mean EVAP_{near.upper()}?" if near else None
                raise unknown("environment variable", variable, (), remedy=remedy)
            yield name, env[variable], variable

    return _collect(known())


def _reserved(variable: str) -> bool:
    return any(variable == name or (name.endswith("_") and variable.startswith(name)) for name in RESERVED_ENV)


def _from_toml(path: Path) -> Given:
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as e:
        raise StartupError(f"cannot read {path}: {e.strerror}", remedy="check --config (or EVAP_CONFIG)") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise StartupError(f"{path} is not valid TOML: {e}") from e
    return _collect(_toml_items(path, tables))


def _toml_items(path: Path, tables: Mapping[str, object]) -> Iterator[tuple[str, object, str]]:
    parts = [part.name for part in fields(Config)]
    for part, values in tables.items():
        if part not in parts:
            home = _by_name().get(part)
            raise unknown("table or key", part, parts, f" in {path}", f"write it below [{home.part}]" if home else None)
        if not isinstance(values, dict):
            raise StartupError(f"{path}: {part} is a table", remedy=f"write [{part}] on a line, its options below it")
        for name, raw in values.items():
            option = _by_name().get(name)
            if option is None or option.part != part:
                elsewhere = f"it belongs to [{option.part}]" if option else None
                known = [n for n, o in _by_name().items() if o.part == part]
                raise unknown("option", name, known, f" in [{part}] of {path}", elsewhere)
            yield name, raw, f"{path}: [{part}] {name}"


def unknown(what: str, name: str, known: Iterable[str], where: str = "", remedy: str | None = None) -> StartupError:
    """The error for a name nobody knows: it offers the nearest known one."""
    if remedy is None:
        near = _nearest(name, known)
        remedy = f"did you mean {near}?" if near else "python -m evap serve --help lists every option"
    return StartupError(f"unknown {what} {echo(name)}{where}", remedy=remedy)


def _nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def _check(config: Config) -> None:
    """What no single field can say."""
    server, engine = config.server, config.engine
    if bool(server.tls_cert) != bool(server.tls_key):
        missing = "--tls-key" if server.tls_cert else "--tls-cert"
        raise StartupError("TLS needs both a certificate and its key", remedy=f"add {missing} FILE.pem")
    if server.tls and server.tls_cert:
        raise StartupError("--tls self-signed and --tls-cert exclude each other", remedy="keep one of them")
    if server.tls_client_ca and not (server.tls or server.tls_cert):
        raise StartupError("--tls-client-ca asks for TLS", remedy="add --tls-cert and --tls-key, or --tls self-signed")
    if engine.rope_scaling and not _is_json_object(engine.rope_scaling):
        raise StartupError(
            "--rope-scaling is not a JSON object", remedy="""--rope-scaling '{"rope_type":"dynamic","factor":4}'"""
        )


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
