"""The table of supported versions, and everything that quotes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tvmify.torch_compat import versions

ROOT = Path(__file__).parents[2]


def test_interfaces_depend_on_the_minor_version():
    assert versions.minor("2.13.0+cpu") == versions.minor("2.13.1a0+git12") == "2.13"


@pytest.mark.parametrize("row", versions.TORCH, ids=lambda row: row.version)
def test_supported_versions_pass(row: versions.Supported):
    assert versions.complaint(f"{row.version}.1+cu130") == ""


@pytest.mark.parametrize("installed", ["2.9.1+cpu", "2.1.0", "2.99.0", "3.0.0"])
def test_unsupported_version_names_range_and_command(installed: str):
    text = versions.complaint(installed)
    assert installed in text and versions.supported_torch() in text
    assert text.endswith(f"pip install '{versions.torch_requirement()}'") and "\n" not in text


def test_a_missing_pytorch_is_named():
    assert "none is installed" in versions.complaint(None)


def test_import_with_unsupported_pytorch_fails_clearly(tmp_path: Path):
    # It is refused before the import: this package is empty, so nothing of it is used.
    (tmp_path / "torch-2.9.1.dist-info").mkdir()
    (tmp_path / "torch-2.9.1.dist-info/METADATA").write_text("Name: torch\nVersion: 2.9.1\n")
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    script = "import sys; sys.path[:0] = sys.argv[1:]; from tvmify import tvmify"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"tvmify.errors.NativeLibraryError: {versions.complaint('2.9.1')}"
    )


def test_the_table_has_no_gaps():
    for table in (versions.TORCH, versions.PYTHON):
        numbers = [int(row.version.partition(".")[2]) for row in table]
        assert numbers == [*range(numbers[0], numbers[-1] + 1)]
        assert {row.tests for row in table} <= {"all", "smoke", "none"}


def test_docs_match_the_table():
    page = (ROOT / "docs" / "versions.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    said = {line[1]: line[4] for line in cells if len(line) == 10}
    for kind, table in (("torch", versions.TORCH), ("python", versions.PYTHON)):
        for row in table:
            # CI runs all tests with the pinned versions, which have no row.
            assert said.get(f"{kind}-{row.version}", "all").split(",")[0] == row.tests


def test_the_project_file_and_the_tested_pins_agree_with_the_table():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={versions.PYTHON[0].version}"' in project
    assert f'"{versions.torch_requirement()}"' in project
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert named == [row.version for row in versions.PYTHON]
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    tests = {row.version: row.tests for row in versions.TORCH}
    assert tests[versions.minor(pinned[1])] == "all"
