"""Tests mirror the paths of the modules that they test."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "tvmify"
# Tests of user-visible behaviour, and tests that do not belong to one module.
ELSEWHERE = {"behaviour", "gpu", "benchmarks", "conformance"}


def mirrored() -> list[Path]:
    files = (path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))
    return sorted(path for path in files if not ELSEWHERE & set(path.parts))


@pytest.mark.parametrize("path", mirrored(), ids=str)
def test_tests_mirror_the_paths_of_modules(path: Path) -> None:
    if path.name == Path(__file__).name:
        return
    folder, name = PACKAGE / path.parent, path.stem.removeprefix("test_")
    folders = [folder]
    if folder.name == "runtime":  # most of which is native
        folders += [PACKAGE / "native", PACKAGE / "native" / "python"]
    suffixes = (".py", ".cpp", ".h", "/__init__.py")
    candidates = [place / f"{name}{suffix}" for place in folders for suffix in suffixes]
    # Tests of a whole small package have its name.
    assert name == folder.name or any(place.exists() for place in candidates)
