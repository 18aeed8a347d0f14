from __future__ import annotations

import ast
import shutil
from importlib.util import resolve_name
from pathlib import Path

import pytest

import tvmify
from tvmify.dispatch import keys, sources

PACKAGE = Path(tvmify.__path__[0])


def parsed(path: Path) -> set[str]:
    """The names that a file of the package imports from it, by Python's own parser."""
    folders = path.relative_to(PACKAGE.parent).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = resolve_name(base, ".".join(folders)) if node.level else base
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "tvmify"}


def test_all_imports_are_followed() -> None:
    for path in PACKAGE.rglob("*.py"):
        inside = ".".join(path.relative_to(PACKAGE.parent).parts[:-1])
        assert parsed(path) <= sources.imports(path.read_bytes(), inside), path


#: A package whose `compiler` reaches everything except `own`, `cli` and what those import.
SMALL = {
    "__init__.py": "from small import cli",
    "cli.py": "from small import own",
    "own.py": "",
    "errors.py": "class Failure(Exception): ...",
    "aliased.py": "",
    "lazy.py": "from small.further import x",
    "further.py": "x = 1",
    "typed.py": "",
    "plain.py": "",
    "folder/__init__.py": "from .near import y",
    "folder/near.py": "y = 1",
    "folder/deep.py": "",
    "folder/idle.py": "",
    "compiler/__init__.py": "",
    "compiler/unused.py": "",
    "compiler/main.py": """
from typing import TYPE_CHECKING
from small.errors import (
    Failure,  # (what is missing)
)
from small import aliased as another, \\
    plain
import small.folder.deep

if TYPE_CHECKING:
    from small.typed import Type

def run():
    from small import lazy
""",
}
APART = {"__init__.py", "cli.py", "own.py", "folder/idle.py"}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    for name, text in SMALL.items():
        path = tmp_path / "small" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "small"


@pytest.mark.parametrize("name", SMALL)
def test_only_reachable_sources_count(small: Path, name: str) -> None:
    before = sources.digest(small, ["small.compiler"])
    with (small / name).open("a") as file:
        file.write("\n#")
    assert (sources.digest(small, ["small.compiler"]) == before) == (name in APART)


def test_package_init_definitions_are_reached(small: Path) -> None:
    (small / "compiler/unused.py").write_text("from small import __version__")
    assert {"small", "small.cli", "small.own"} <= sources.reached(small, ["small.compiler"]).keys()


def test_names_count(small: Path) -> None:
    before = sources.digest(small, ["small.compiler"])
    (small / "compiler/unused.py").rename(small / "compiler/other.py")
    assert sources.digest(small, ["small.compiler"]) != before


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of tvmify's sources."""
    copy = tmp_path_factory.mktemp("copy") / "tvmify"
    ignored = shutil.ignore_patterns("native", "lib", "*.so", "__pycache__", "share")
    shutil.copytree(PACKAGE, copy, ignore=ignored)
    return copy


@pytest.mark.parametrize(
    ("marker", "counts"),
    [
        ("def structure_text(", True),
        ("def describe_objects(", True),
        ("def recurrent_shapes(", True),
        ("class Artifact:", True),
        ("class CaptureError(", True),
        ("def lower(\n", True),
        ("def fingerprint(", True),
        ("def output_structure(", True),
        ("class Builder:", True),
        ("def main(niceness", True),
        ("def hints_of_class(", True),
        ("def tuned_shapes(", True),
        ("def sizes_of(", True),
        ("class Dispatcher:", False),
        ("class DiskCache:", False),
        ("def doctor(", False),
    ],
)
def test_only_relevant_source_edits_change_the_key(
    package: Path, monkeypatch: pytest.MonkeyPatch, marker: str, counts: bool
) -> None:
    monkeypatch.setattr(tvmify, "__path__", [str(package)])
    before = keys._compiler_digest.__wrapped__()
    edited = [path for path in package.rglob("*.py") if f"\n{marker}" in path.read_text()]
    assert edited
    for path in edited:  # at any path, since files move
        text = path.read_text()
        path.write_text(f"{text}\n#")
        assert (keys._compiler_digest.__wrapped__() != before) == counts, path
        path.write_text(text)
