"""Pages that are made from the tree: what differs from what stands there, and bringing them up to date."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from pathlib import Path


def difference(page: Path, new: str) -> str:
    """What would change, as a diff; empty when the page is up to date."""
    old = page.read_text().splitlines() if page.exists() else []
    return "\n".join(difflib.unified_diff(old, new.splitlines(), page.name, "the tree", n=0, lineterm=""))


def filled(page: Path, mark: str, end: str, text: str) -> str:
    """The page with `text` between the two lines."""
    before, _, rest = page.read_text().partition(mark)
    return f"{before}{mark}\n{text}\n{end}{rest.partition(end)[2]}"


def main(argv: list[str], page: Path, written: Callable[[], str]) -> int:
    """Say what differs (exit code 1 if anything does), or with --write bring the page up to date."""
    new = written()
    diff = difference(page, new)
    if diff and "--write" in argv:
        page.write_text(new)
    elif diff:
        sys.stdout.write(diff + "\n")
        return 1
    return 0
