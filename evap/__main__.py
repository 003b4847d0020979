"""The command line: `python -m evap serve|model|keys|usage|doctor|version`.

Each command imports what it needs when it runs, so that `--help` and the synthetic engine start at once. An error
that the user can mend is one line and a remedy on stderr, with exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from evap import __version__, options
from evap.errors import StartupError

_EXAMPLES = """examples:
  python -m evap serve                          the built-in small model, on http://127.0.0.1:8000
  python -m evap serve Qwen/Qwen3-0.6B --port 0 a model from the Hugging Face hub, on a free port
  python -m evap serve --engine synthetic       no model at all: for load tests
  python -m evap serve --help                   every option
"""

_PRECEDENCE = """\
Every option can also be set in the environment (--max-body-bytes is EVAP_MAX_BODY_BYTES) and in
the TOML file of --config ([protocol] max_body_bytes = 1000). A flag wins over the environment,
the environment over the file. A unit at the end of a name may be left out: --drain-timeout is
--drain-timeout-s.
"""


_KEYS = """\
Only the hash of a secret is in the file. A running server reads the file again on SIGHUP.
"""

_MODEL_NAMES = """\
NAME is a directory, a Hugging Face id (owner/name), or a built-in name. EVAP_CACHE_DIR moves
evap's own cache, HF_HOME that of the hub.
"""


class _Parser(argparse.ArgumentParser):
    """argparse that raises StartupError instead of printing its usage, and never guesses at abbreviations."""

    def __init__(self, *, prog: str, description: str, epilog: str = "", usage: str | None = None) -> None:
        super().__init__(prog=prog, description=description, epilog=epilog, usage=usage, allow_abbrev=False,
                         formatter_class=_Help)  # fmt: skip

    def error(self, message: str) -> NoReturn:
        raise StartupError(message.removeprefix("argument "), remedy=f"{self.prog} --help")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of `argv`; an unknown flag is refused with the nearest known one."""
        parsed, rest = self.parse_known_args(argv)
        for word in (w for w in rest if w.startswith("-")):
            flag = word.split("=", 1)[0]
            raise options.unknown("flag", flag, self._option_string_actions, remedy=None)
        if rest:
            raise StartupError(f"unexpected argument {rest[0]!r}", remedy=f"{self.prog} --help")
        return parsed


class _Help(argparse.RawDescriptionHelpFormatter):
    """One option a line, as far as the terminal allows."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)


def _serve_parser(prog: str, description: str) -> _Parser:
    parser = _Parser(prog=prog, description=description, epilog=_PRECEDENCE, usage=f"{prog} [MODEL] [options]")
    options.add_arguments(parser)
    return parser


def _serve(argv: Sequence[str]) -> int:
    parser = _serve_parser("python -m evap serve", "Serve a model over HTTP/2 and HTTP/1.1 on one port.")
    settings = options.load(vars(parser.read(argv)), os.environ)
    from evap import logs

    if settings.config.server.workers > 1:
        from evap.processes import run
    else:
        from evap.server import run
    try:
        return run(settings.config)
    finally:
        logs.flush()  # an error is the last line that a user sees


def _doctor(argv: Sequence[str]) -> int:
    parser = _serve_parser("python -m evap doctor", "Check what `serve` would find, given the same options.")
    settings = options.load(vars(parser.read(argv)), os.environ)
    from evap import doctor

    return doctor.run(settings)


def _model(argv: Sequence[str]) -> int:
    parser = _Parser(prog="python -m evap model", usage="python -m evap model list | pull [NAME] | path [NAME]",
                     description="Models on this machine.", epilog=_MODEL_NAMES)  # fmt: skip
    parser.add_argument("action", metavar="list|pull|path", choices=("list", "pull", "path"),
                        help="show what is here; fetch NAME; print its directory")  # fmt: skip
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="default: the built-in model")
    given = parser.read(argv)
    from evap.engine import model_cli

    if given.action == "list":
        for entry in model_cli.list_models():
            size = f"{entry.size_bytes / 1e6:8.0f} MB" if entry.path else "not fetched"
            sys.stdout.write(f"{entry.name:40} {entry.source:8} {size:>11}  {entry.path or ''}\n".rstrip(" "))
        return 0
    with model_cli.console_progress() as progress:
        found = model_cli.pull(given.name, progress)
    sys.stdout.write(f"{found.path}\n")
    return 0


def _keys(argv: Sequence[str]) -> int:
    parser = _Parser(prog="python -m evap keys", epilog=_KEYS,
                     usage="python -m evap keys create|revoke NAME | list  [--file FILE] [limits]",
                     description="API keys of the file that `serve --api-keys` reads.")  # fmt: skip
    parser.add_argument("action", metavar="create|list|revoke", choices=("create", "list", "revoke"),
                        help="make a key and print its secret, once; show all; end one")  # fmt: skip
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="of the key: letters, digits, - and _")
    parser.add_argument("--file", metavar="FILE", default=os.environ.get("EVAP_API_KEYS", "keys.toml"),
                        help="the key file (EVAP_API_KEYS, else keys.toml)")  # fmt: skip
    from evap.metering import keys_cli

    keys_cli.add_limits(parser)
    given = parser.read(argv)
    if (given.action == "list") == bool(given.name):
        raise StartupError(
            f"keys {given.action} takes {'no name' if given.name else 'a NAME'}", remedy=parser.usage or ""
        )
    sys.stdout.write(keys_cli.run(given))
    return 0


def _usage(argv: Sequence[str]) -> int:
    parser = _Parser(prog="python -m evap usage", usage="python -m evap usage --data-dir DIR [options]",
                     description="What was used, from the ledger; also while the server runs.")  # fmt: skip
    env = os.environ.get
    parser.add_argument("--data-dir", metavar="DIR", default=env("EVAP_DATA_DIR", ""), help="the server's --data-dir")
    parser.add_argument("--group-by", metavar="NAMES", default="day,model,key",
                        help="of day, model, key; or exchange for one row each (default day,model,key)")  # fmt: skip
    parser.add_argument("--from", metavar="DATE", dest="first", help="first day (UTC)")
    parser.add_argument("--to", metavar="DATE", dest="last", help="last day")
    parser.add_argument("--model", metavar="NAME", help="only this model")
    parser.add_argument("--key", metavar="NAME", help="only this key")
    parser.add_argument("--prices", metavar="FILE", default=env("EVAP_PRICES", ""), help="TOML price list: adds costs")
    parser.add_argument("--format", choices=("table", "csv", "jsonl", "parquet"), default="table", help="default table")
    parser.add_argument("--output", metavar="FILE", default="-", help="default: stdout")
    given = parser.read(argv)
    from evap.metering import usage_report

    usage_report.run(given)
    return 0


def _version(argv: Sequence[str]) -> int:
    _Parser(prog="python -m evap version", description="Print the version.").read(argv)
    sys.stdout.write(f"evap {__version__}\n")
    return 0


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "serve": (_serve, "serve a model"),
    "model": (_model, "list, fetch and find models"),
    "keys": (_keys, "create, list and revoke API keys"),
    "usage": (_usage, "what was used, from the ledger"),
    "doctor": (_doctor, "say what works on this machine and what is missing"),
    "version": (_version, "print the version"),
}


def _help() -> str:
    lines = [f"  {name:9}{about}" for name, (_, about) in COMMANDS.items()]
    return "usage: python -m evap COMMAND [options]\n\ncommands:\n" + "\n".join(lines) + "\n\n" + _EXAMPLES


def _dispatch(argv: Sequence[str]) -> int:
    if not argv:
        sys.stderr.write(_help())
        return 2
    word = {"--version": "version", "-V": "version"}.get(argv[0], argv[0])
    if word in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0
    if word not in COMMANDS:
        raise options.unknown("command", word, COMMANDS)
    return COMMANDS[word][0](argv[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 fine, 1 a check failed, 2 an error that the user can mend, 130 ^C."""
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except StartupError as e:
        remedy = f"  try: {e.remedy}\n" if e.remedy else ""
        sys.stderr.write(f"error: {e.message}\n{remedy}")
        return 2
    except KeyboardInterrupt:
        return 130
    except (
        BrokenPipeError
    ):  # `python -m evap model list | head -1`; the null device spares us the interpreter's last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
