"""The file list of ARCHITECTURE.md, made from the tree: one line per file, with the first sentence of its docstring.

python -m tests.tools.architecture            what differs; exit code 1 if anything does
python -m tests.tools.architecture --write    bring the page up to date
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Final

from tests.tools import pages

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PAGE: Final = ROOT / "ARCHITECTURE.md"
BEGIN: Final = "<!-- files: python -m tests.tools.architecture --write -->"
END: Final = "<!-- /files -->"
FOLDERS: Final = ("evap", "tests", "fuzz", "bench", "examples")
SUFFIXES: Final = (".py", ".cu", ".h", ".cpp", ".c", ".mjs", ".js", ".sh")
WIDTH: Final = 130


def sources(folder: str) -> list[Path]:
    """Source files of a folder, in the order of the list, without packages' empty __init__.py."""
    found = [p for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES and p.is_file()]
    kept = [p for p in found if "__pycache__" not in p.parts and (p.name != "__init__.py" or p.read_text().strip())]
    return sorted(kept, key=lambda p: (p.parts[:-1], p.name))


def mirrored(path: Path) -> bool:
    """A test file whose place says what it tests: it needs no line of its own."""
    inside = path.relative_to(ROOT / "tests")
    return path.name.startswith("test_") and (ROOT / "evap" / inside.parent).is_dir() and inside.parent != Path(".")


def summary(path: Path) -> str:
    """The first sentence of a file's docstring or leading comment."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = re.sub(r"^(#!.*\n)?\s*(/\*+|//|#)?\s*", "", text)
    sentence = re.split(r"(?<=[.])\s|\n\s*\n|\*/", text, maxsplit=1)[0]
    return " ".join(sentence.split()).rstrip(".:;")


def fitted(line: str) -> str:
    """`line`, shortened at a joint of its sentence where it is too long."""
    if len(line) <= WIDTH:
        return line
    joint = max(line.rfind(mark, 40, WIDTH) for mark in (": ", "; ", ", ", " ("))
    return line[:joint] if joint > 60 else line[: WIDTH - 3].rsplit(" ", 1)[0] + "..."


def listing() -> str:
    """The list, as it stands between the two marks."""
    lines: list[str] = []
    for folder in FOLDERS:
        shown: set[Path] = set()
        for path in sources(folder):
            if folder == "tests" and mirrored(path):
                continue
            for parent in reversed(path.relative_to(ROOT).parents[:-1]):
                if parent not in shown:
                    shown.add(parent)
                    lines.append(f"{'  ' * (len(parent.parts) - 1)}{parent.name}/")
            depth = len(path.relative_to(ROOT).parts) - 1
            lines.append(fitted(f"{'  ' * depth + path.name:30} {summary(path)}".rstrip()))
    return "```\n" + "\n".join(lines) + "\n```"


def written() -> str:
    """The page as it should be. Raises ValueError when a mark is missing."""
    page = PAGE.read_text()
    return f"{page[: page.index(BEGIN) + len(BEGIN)]}\n{listing()}\n{page[page.index(END) :]}"


def difference() -> str:
    """What would change, as a diff; empty when the page is up to date."""
    return pages.difference(PAGE, written())


if __name__ == "__main__":
    sys.exit(pages.main(sys.argv[1:], PAGE, written))
