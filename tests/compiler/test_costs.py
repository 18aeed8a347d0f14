"""One package has the measured numbers, with their sources; rules hold none of their own."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tvmify.compiler import costs
from tvmify.compiler.costs import Kind, Number

TABLES = {name: value for name, value in vars(costs).items() if name.isupper() and name[0] != "_"}
NUMBERS = {
    f"{table}.{field}": number
    for table, value in TABLES.items()
    for field, number in costs.numbers(value).items()
}
FOLDER = Path(costs.__file__).parent
ROOT = FOLDER.parents[2]


def _git(*arguments: str) -> str | None:
    """Return what git prints in this checkout; None if it fails."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


@pytest.mark.parametrize("number", NUMBERS.values(), ids=list(NUMBERS))
def test_a_number_has_a_unit_and_says_how_it_was_found(number: Number) -> None:
    value, unit, source = number
    assert all(each > 0 for each in (value if isinstance(value, tuple) else (value,)))
    assert unit
    assert re.fullmatch("[0-9a-f]{7,}", source.commit)
    was_run = source.kind in (Kind.MEASURED, Kind.FITTED)
    assert bool(source.command) == was_run
    assert bool(source.machine) == was_run
    assert bool(source.reason) != was_run


def test_each_commit_exists() -> None:
    if _git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs a git checkout with its history")
    commits = sorted({number.source.commit for number in NUMBERS.values()})
    assert not [commit for commit in commits if _git("cat-file", "-t", commit) != "commit"]


def test_each_command_is_a_module_of_this_repository() -> None:
    commands = {number.source.command for number in NUMBERS.values()} - {""}
    modules = {re.match(r"python -m (benchmarks\.\w+)", command) for command in commands}
    names = {module[1] if module else None for module in modules}
    assert None not in names
    assert all(importlib.util.find_spec(name) for name in names if name)


def test_no_number_is_unused() -> None:
    files = [path for path in FOLDER.parent.rglob("*.py") if FOLDER not in path.parents]
    text = "\n".join(path.read_text() for path in files)
    assert not [name for name in NUMBERS if not re.search(rf"\b{re.escape(name)}\b", text)]


def test_what_was_found_is_on_the_page_of_constants() -> None:
    page = (ROOT / "docs/measurements/constants.md").read_text()
    run = [name for name, number in NUMBERS.items() if number.source.command]
    assert not [name for name in run if f"`{name}`" not in page]
