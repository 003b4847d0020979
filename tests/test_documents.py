"""What the documents name exists: options, variables, commands with their flags, numbers of /metrics, links."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from evap import __main__, options
from evap.metrics import FAMILIES, VLLM
from tests.tools import architecture, metrics_table

ROOT = architecture.ROOT
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
#: Flags in the documents that are those of other programs.
FOREIGN = {
    "http1": "curl's --http1.1", "http2-prior-knowledge": "curl", "no-deps": "pip", "strict": "mypy",
}  # fmt: skip
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")


def page(path: Path) -> str:
    """Its text, without what the changelog says of versions that are past."""
    text = path.read_text()
    return re.sub(r"(?s)\n## (?!Unreleased).*", "", text) if path.name == "CHANGELOG.md" else text


def pages() -> list[Path]:
    return [path for path in PAGES if path.name != "CHANGELOG.md"]


def serve_flags() -> set[str]:
    known = {"config", "help"}
    for option in options.table():
        known |= {option.flag[2:], *([option.alias.replace("_", "-")] if option.alias else [])}
    return known


def flags_in_source(path: Path) -> set[str]:
    """Those that a bench, a tool or a fuzz target takes: they stand in its source as argparse is given them."""
    return {"help", *re.findall(r'"--([a-z][a-z0-9-]+)"', path.read_text())}


def flags_of(module: str, word: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Flags that `python -m module word` takes."""
    if module != "evap":
        source = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        helpers = (source.with_name(name) for name in ("runner.py", "pages.py"))  # read the flags of fuzz, tests.tools
        return flags_in_source(source).union(*(flags_in_source(path) for path in helpers if path.is_file()))
    if word in ("serve", "doctor"):
        return serve_flags()
    with pytest.raises(SystemExit):
        __main__.COMMANDS[word][0](["--help"])
    return set(FLAG.findall(capsys.readouterr().out)) | {"help"}


def commands(text: str) -> list[tuple[str, str, set[str]]]:
    """(module, first word after it, flags) of each `python -m ...` in a page, whose lines may be continued."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"python -m ([A-Za-z0-9_.]+)((?:[^\n`#|]|\|(?=[a-z]))*)", joined)
    return [
        (module.rstrip("."), next(iter(rest.split()), "") if rest[:1] == " " else "", set(FLAG.findall(rest)))
        for module, rest in found
    ]


OUTSIDE = {"pytest", "NAME", "pip", "venv"}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_commands_exist_and_take_the_flags_that_are_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for module, rest, flags in commands(page(path)):
        if module in OUTSIDE or not module.islower():
            continue
        assert find_spec(module) is not None, f"python -m {module}"
        word = rest.split("|")[0]
        if module == "evap":
            assert word in __main__.COMMANDS or not word.isalpha(), f"python -m evap {word}"
        if flags:
            assert flags <= flags_of(module, word, capsys), f"python -m {module} {word}"


@pytest.mark.parametrize("path", pages(), ids=lambda p: p.name)
def test_every_option_exists(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page(path)
    shown = {flag for _, _, flags in commands(text) for flag in flags}
    taken = {flag for source in architecture.sources("bench") for flag in flags_in_source(source)}
    for word in ("keys", "usage", "model"):
        taken |= flags_of("evap", word, capsys)
    taken |= flags_of("fuzz.runner", "", capsys)
    used = set(FLAG.findall(text))
    assert not used - shown - serve_flags() - taken - set(FOREIGN)


@pytest.mark.parametrize("path", pages(), ids=lambda p: p.name)
def test_every_variable_exists(path: Path) -> None:
    known = {option.env for option in options.table()}
    known |= {"EVAP_" + option.alias.upper() for option in options.table() if option.alias}
    for name in set(re.findall(r"\bEVAP_[A-Z_]+\b", page(path))) - known:
        assert any(name == own or (own.endswith("_") and name.startswith(own)) for own in options.RESERVED_ENV), name


@pytest.mark.parametrize("path", pages(), ids=lambda p: p.name)
def test_every_number_of_the_metrics_page_exists(path: Path) -> None:
    served = set(metrics_table.families()) | {f"vllm:{name}" for name in VLLM}
    served |= {*FAMILIES, *(f"{name}_total" for name in FAMILIES)}
    served.add("evap_usage")  # the sink's table
    for name in set(re.findall(r"`(evap_[a-z_]+)[`{*]", page(path))):
        whole = name.rstrip("_")
        assert whole in served or any(other.startswith(name) for other in served), name


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page(path)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, part = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        assert place.exists(), target
        if part:
            headings = re.findall(r"(?m)^#+ (.*)$", place.read_text())
            assert part in map(anchor, headings), target


def test_the_readme_and_contributing_name_every_make_word_and_nothing_else() -> None:
    found = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"`?\bmake ([a-z-]+)", text)) == set(found[1].split())
