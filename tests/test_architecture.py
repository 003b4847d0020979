"""The rules about the tree itself: files stay small, tests mirror it, the documents say what is there."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from evap import __version__, dispatch
from evap.options import table
from evap.protocol import limits as protocol_limits
from tests.tools import architecture, limits_table, metrics_table

ROOT = architecture.ROOT
MAX_LINES = 350

#: Files of evap/ without a test file of their own, each with its reason.
UNMIRRORED = {
    "engine/interface.py": "typing.Protocol only; check_request is tested through every engine",
    "protocol/events.py": "dataclasses and typing.Protocol only",
    "choice.py": "data only; exchange and steps have the rules",
}

#: Parts of one thing that are tested together, where their seam would only be in the way: file -> its test file.
TESTED_BY: dict[str, str] = {
    "states.py": "test_exchange.py",
    "loop_child.py": "test_processes.py",
    "loop_process.py": "test_processes.py",
    "metering/survivors.py": "test_accounting.py",
    "protocol/rowplan.py": "protocol/test_rows.py",
}


def tree(*folders: str) -> list[Path]:
    return [path for folder in folders for path in architecture.sources(folder)]


def committed() -> list[Path]:
    """What git knows; every file where this is no checkout."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = (
        done.stdout.split("\0") if done.returncode == 0 else [str(p) for p in tree("evap", "tests", "fuzz", "bench")]
    )
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("path", tree("evap", "tests", "fuzz", "bench"), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_fits_in_a_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_a_fuzz_target_states_one_invariant() -> None:
    targets = [path for path in tree("fuzz") if "def one_input" in path.read_text()]
    long = [path.name for path in targets if len(path.read_text().splitlines()) > 60]
    assert not long


def test_each_module_has_its_own_tests() -> None:
    missing = []
    for path in tree("evap"):
        inside = path.relative_to(ROOT / "evap")
        if path.suffix != ".py" or path.name == "__init__.py" or str(inside) in UNMIRRORED:
            continue
        place = ROOT / "tests" / inside.parent
        stem = inside.stem.strip("_")
        if str(inside) in TESTED_BY:
            if not (ROOT / "tests" / TESTED_BY[str(inside)]).is_file():
                missing.append(f"evap/{inside}: no tests/{TESTED_BY[str(inside)]}")
        elif not [*place.glob(f"test_{stem}.py"), *place.glob(f"test_{stem}_*.py")]:
            missing.append(f"evap/{inside}: no {place.relative_to(ROOT)}/test_{stem}.py")
    assert not missing, "\n".join(missing)


def test_exceptions_from_the_mirror_exist_and_are_needed() -> None:
    for name in [*UNMIRRORED, *TESTED_BY]:
        path = Path(name)
        assert (ROOT / "evap" / path).is_file(), name
        assert not (ROOT / "tests" / path.parent / f"test_{path.stem}.py").exists(), (
            f"{name} has tests: drop the exception"
        )


def test_each_test_folder_is_a_package() -> None:
    folders = {path.parent for path in tree("tests") if path.suffix == ".py"}
    assert not [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").is_file()]


def test_architecture_md_lists_the_tree() -> None:
    diff = architecture.difference()
    assert not diff, f"run: python -m tests.tools.architecture --write\n{diff}"


def test_the_documents_list_each_number_of_the_metrics_page() -> None:
    assert metrics_table.PAGE.read_text() == metrics_table.written(), "run: python -m tests.tools.metrics_table --write"


def test_the_documents_list_each_limit() -> None:
    assert limits_table.PAGE.read_text() == limits_table.written(), "run: python -m tests.tools.limits_table --write"
    names = {*protocol_limits.LIMITS, *dispatch.LIMITS}
    assert set(limits_table.LIMITS) == names
    assert {limit for option in table() for limit in option.limits} | set(limits_table.ELSEWHERE) == names


def test_each_limit_and_each_of_its_options_is_in_a_test() -> None:
    tests = "".join(path.read_text() for path in tree("tests") if path.name.startswith("test_"))
    options = {option.name for option in table() if option.limits}
    missing = [name for name in sorted(options) if not re.search(rf"\b{name}\b|--{name.replace('_', '-')}", tests)]
    missing += [name for name in limits_table.LIMITS if f'"{name}"' not in tests]
    assert not missing


def test_each_listed_file_says_what_it_is() -> None:
    silent = [p for p in tree("evap", "fuzz", "bench") if not architecture.summary(p)]
    assert not silent, [str(p.relative_to(ROOT)) for p in silent]


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "ARCHITECTURE.md").read_text()
    reasons = page[page.index("## Dependencies") :]
    lines = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    names = {re.split(r"[\[<>=;~ ]", line)[0] for line in lines}
    assert not sorted(name for name in names if f"`{name}`" not in reasons)


def test_every_error_of_import_rules_is_named_in_pyproject() -> None:
    """A new module at the top of the package finds its layer, whatever the linter is told to ignore."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = re.findall(r"\w+", " ".join(contracts[0]["layers"]))
    top = {
        p.stem
        for p in (ROOT / "evap").iterdir()
        if (p.suffix == ".py" and p.name != "__init__.py") or (p / "__init__.py").exists()
    }
    assert top == top & set(layers), sorted(top - set(layers))


def test_the_changelog_has_room_for_the_next_change() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## Unreleased$", text, re.MULTILINE)
    assert __version__


#: Paths of one machine, which must not stand in any file. In two halves, so that this file passes.
FORBIDDEN = ["/wo" + "rk/", "/tmp/" + "evap", "/ro" + "ot/", "/ho" + "me/", "shared/" + "design"]


@pytest.mark.parametrize("word", FORBIDDEN)
def test_no_file_names_a_place_on_one_machine(word: str) -> None:
    found = [str(p.relative_to(ROOT)) for p in committed() if word.encode() in p.read_bytes()]
    assert not found
