"""`python -m evap keys`: what the command prints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from evap.errors import StartupError
from evap.metering import keys

LIMITS: Final = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute, prompts included",
    "max_streams": "requests that may run at once",
    "tokens_per_day": "tokens per day (UTC)",
    "tokens_per_month": "tokens per month (UTC)",
    "priority": "lower is sooner (default 0)",
    "most_urgent": "lowest urgency (0 to 7) that its requests may claim (default 0)",
}


def add_limits(parser: argparse.ArgumentParser) -> None:
    for name, text in LIMITS.items():
        parser.add_argument("--" + name.replace("_", "-"), metavar="N", help=f"create: {text}")
    parser.add_argument("--model", metavar="NAME", action="append", help="create: may use this model only; repeatable")
    parser.add_argument("--admin", action="store_true", help="create: sees everybody's usage")


def run(given: argparse.Namespace) -> str:
    """What to print. Raises StartupError."""
    path = Path(given.file)
    if given.action == "list":
        return _listed(path)
    if given.action == "revoke":
        keys.revoke(path, given.name)
        return f"revoked {given.name} in {path}; kill -HUP the server, or restart it\n"
    secret = keys.create(path, given.name, _settings(given))
    return f"{secret}\n"


def _settings(given: argparse.Namespace) -> dict[str, object]:
    settings: dict[str, object] = {}
    for name in LIMITS:
        text = getattr(given, name)
        if text is None:
            continue
        try:
            settings[name] = int(text)
        except ValueError:
            flag = "--" + name.replace("_", "-")
            raise StartupError(f"{flag}: expected a whole number, got {text!r}", remedy=f"{flag} 1000") from None
    if given.model:
        settings["models"] = tuple(given.model)
    if given.admin:
        settings["admin"] = True
    return settings


def _listed(path: Path) -> str:
    lines = []
    for name, table in keys.tables(path).items():
        limits = [f"{limit}={getattr(table, limit)}" for limit in LIMITS if getattr(table, limit)]
        marks = [word for word, on in (("admin", table.admin), ("revoked", table.revoked)) if on]
        models = [] if "*" in table.models else [f"models={','.join(table.models)}"]
        lines.append("  ".join([f"{name:20}", *marks, *models, *limits]).rstrip())
    return "\n".join(lines) + "\n" if lines else "no keys\n"
