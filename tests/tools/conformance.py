"""docs/conformance.md, made from the registers in tests/conformance: what comes in, the reaction, the sections.

python -m tests.tools.conformance            what differs; exit code 1 if anything does
python -m tests.tools.conformance --write    bring the page up to date
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Final

from tests import conformance
from tests.conformance.cases import CASES, PENDING
from tests.conformance.listing import CASE_LIST, PARTS
from tests.conformance.sections import SECTIONS
from tests.tools import pages
from tests.tools.architecture import ROOT

PAGE: Final = ROOT / "docs" / "conformance.md"
HEAD: Final = """# Conformance

Made from the tests by `python -m tests.tools.conformance --write`; a test holds this page to them.

## Bad input

What a server on a hostile internet must withstand, each case with its reaction and the sections that ask for it. C: the
connection ends with GOAWAY, S: only the stream ends (RST_STREAM), its neighbours go on. Every case drives the wire core
that the server uses, in memory, frame by frame; a sample is repeated over TCP and TLS (`tests/conformance`).
"""
SECTIONS_HEAD: Final = """## Section by section

What a checker of RFC 9113 and RFC 7541 asks a server, over a socket, in cleartext and over TLS: {count} checks on each
(`tests/conformance/sections*.py`). The list follows the sections of h2spec in strict mode (RFC 7540's numbering differs
in places; RFC 9113's is given). h2spec itself is not run: it comes from none of the package registries that the tests
install from. Where RFC 9113 has taken a demand of RFC 7540 back (priorities, 5.3), the new text is held.
"""


def load() -> None:
    """Import every test module, so that the register is complete."""
    for module in pkgutil.iter_modules(conformance.__path__):
        importlib.import_module(f"tests.conformance.{module.name}")


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def case_rows() -> list[str]:
    lines: list[str] = []
    for number, (what, reaction) in enumerate(CASE_LIST, 1):
        if number in PARTS:
            lines += ["", f"### {PARTS[number]}", "", "| case | input | reaction | sections | tests |"]
            lines.append("| ---: | --- | --- | --- | ---: |")
        found = CASES.get(number, [])
        sections = ", ".join(dict.fromkeys(s for test in found for s in test.sources))
        if number in PENDING:
            sections, count = PENDING[number], "pending"
        else:
            count = str(len(found))
        lines.append(f"| {number} | {escaped(what)} | {escaped(reaction)} | {escaped(sections)} | {count} |")
    return lines


def section_rows() -> list[str]:
    lines = ["| section | checks |", "| --- | --- |"]
    grouped: dict[str, list[str]] = {}
    for check in SECTIONS:
        grouped.setdefault(check.section, []).append(check.what)
    for section, whats in grouped.items():
        lines.append(f"| {section} | {escaped('; '.join(whats))} |")
    return lines


def page() -> str:
    load()
    parts = [HEAD.rstrip(), *case_rows(), "", SECTIONS_HEAD.format(count=len(SECTIONS)).rstrip(), "", *section_rows()]
    return "\n".join(parts) + "\n"


def difference() -> str:
    """What would change, as a diff; empty when the page is up to date."""
    return pages.difference(PAGE, page())


if __name__ == "__main__":
    sys.exit(pages.main(sys.argv[1:], PAGE, page))
