"""Builds without a compiler, and wheels for several versions of PyTorch merged from one each."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INFO = "tvmify-0.1.0.dist-info"
NAME = "tvmify-0.1.0-cp311-cp311-linux_x86_64.whl"


def wheel(folder: Path, torch: str, python: str = "x = 1\n") -> Path:
    """Write a wheel as `pip wheel` does, with a few bytes for each library."""
    files = {
        "tvmify/__init__.py": python,
        "tvmify/_C.cpython-311-x86_64-linux-gnu.so": f"module for {torch}",
        "tvmify/lib/libtvmify.so": f"library for {torch}",
        f"{INFO}/METADATA": "Metadata-Version: 2.4\nName: tvmify\nVersion: 0.1.0\n"
        f"Requires-Dist: torch=={torch}.*\nRequires-Dist: numpy>=1.24\n",
        f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\n"
        "Tag: cp311-cp311-linux_x86_64\n",
    }
    lines = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        lines.append(f"{name},sha256={digest.rstrip('=')},{len(text)}\n")
    files[f"{INFO}/RECORD"] = "".join(lines) + f"{INFO}/RECORD,,\n"
    path = folder / torch / NAME
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def merge(folder: Path, *wheels: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ".ci/merge_wheels.py", str(folder), *map(str, wheels)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_build_without_a_compiler_names_the_problem(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("there is no C++ compiler")
    assert "Install g++" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("release", [True, False])
def test_description_has_no_links_that_an_index_breaks(tmp_path: Path, release: bool) -> None:
    of_workflow = {
        "GITHUB_SERVER_URL": "https://host.example",
        "GITHUB_REPOSITORY": "owner/tvmify",
        "GITHUB_SHA": "0123abc",
    }
    others = {name: value for name, value in os.environ.items() if name not in of_workflow}
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)],
        cwd=ROOT,
        env=others | of_workflow if release else others,
        check=True,
        timeout=120,
    )
    text = (tmp_path / "tvmify.egg-info" / "PKG-INFO").read_text(encoding="utf-8")
    links = set(re.findall(r"\]\((?!#)([^)]*)\)", text))
    assert links and all(link.startswith("https://") for link in links)
    home = "https://host.example/owner/tvmify"
    assert (f"{home}/blob/0123abc/docs/shapes.md" in links) is release
    assert (f"Project-URL: Repository, {home}\n" in text) is release
    assert "shapes.md" in text


def test_the_result_has_each_native_part_and_requires_one_of_its_pytorches(tmp_path: Path) -> None:
    made = merge(tmp_path, wheel(tmp_path, "2.11"), wheel(tmp_path, "2.14"))
    assert made.stdout.strip() == str(tmp_path / NAME), made.stderr
    with zipfile.ZipFile(tmp_path / NAME) as archive:
        names = set(archive.namelist())
        for torch in ("2.11", "2.14"):
            build = f"tvmify/builds/torch-{torch}"
            library = archive.read(f"{build}/lib/libtvmify.so")
            module = archive.read(f"{build}/_C.cpython-311-x86_64-linux-gnu.so")
            assert library.decode() == f"library for {torch}"
            assert module.decode() == f"module for {torch}"
        metadata = archive.read(f"{INFO}/METADATA").decode()
    assert not {name for name in names if name.startswith(("tvmify/lib", "tvmify/_C"))}
    assert "tvmify/__init__.py" in names
    assert "Requires-Dist: torch>=2.11,<2.15,!=2.12.*,!=2.13.*\n" in metadata
    assert "Requires-Dist: numpy>=1.24\n" in metadata


def test_mismatched_wheels_are_refused(tmp_path: Path) -> None:
    first = wheel(tmp_path, "2.11")
    refused = merge(tmp_path, first, wheel(tmp_path, "2.14", python="x = 2\n"))
    assert refused.returncode == 1
    assert "tvmify/__init__.py differs" in refused.stderr
    twice = merge(tmp_path, first, first)
    assert twice.returncode == 1
    assert "two wheels are for PyTorch 2.11" in twice.stderr
    assert not (tmp_path / NAME).exists()
