"""Merge wheels that were built with different versions of PyTorch into one.

    python .ci/merge_wheels.py dist torch-2.13/tvmify-0.1.0-….whl torch-2.15/tvmify-0.1.0-….whl

Each wheel has the same Python files, and its native part: ``tvmify/_C.….so`` and ``tvmify/lib``.
The result has the Python files once, and each native part in ``tvmify/builds/torch-VERSION``,
where ``tvmify/runtime/native.py`` and CMake look for the matching one. It requires one of these
versions of PyTorch.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSIONS = Path(__file__).parents[1] / "tvmify" / "torch_compat" / "versions.py"
_TORCH = re.compile(r"^Requires-Dist: torch==(\d+\.\d+)\.\*$", re.MULTILINE)


def main(folder: str, *wheels: str) -> None:
    """Write the merged wheel to a folder, and print its path."""
    with tempfile.TemporaryDirectory() as place:
        merged, versions = None, []
        for number, wheel in enumerate(wheels):
            tree = unpacked(wheel, Path(place, str(number)))
            version = torch_of(tree)[0]
            if version in versions:
                sys.exit(f"two wheels are for PyTorch {version}")
            versions.append(version)
            native = [*tree.glob("tvmify/_C.*.so"), tree / "tvmify" / "lib"]
            merged = merged or tree
            check_same(merged, tree, native)
            build = merged / "tvmify" / "builds" / f"torch-{version}"
            build.mkdir(parents=True)
            for path in native:
                shutil.move(path, build / path.name)
        if merged is None:
            sys.exit("expected a folder and wheels")
        metadata = torch_of(merged)[1]
        wanted = f"Requires-Dist: {requirement(versions)}"
        metadata.write_text(_TORCH.sub(wanted, metadata.read_text(encoding="utf-8")), "utf-8")
        command = [sys.executable, "-m", "wheel", "pack", str(merged), "--dest-dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(Path(folder, Path(wheels[0]).name))


def unpacked(wheel: str, place: Path) -> Path:
    """Unpack a wheel and check its checksums; return the folder with the packages."""
    command = [sys.executable, "-m", "wheel", "unpack", wheel, "--dest", str(place)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (tree,) = place.iterdir()
    return tree


def torch_of(tree: Path) -> tuple[str, Path]:
    """Return the version of PyTorch that an unpacked wheel requires, and its metadata file."""
    (metadata,) = tree.glob("*.dist-info/METADATA")
    found = _TORCH.search(metadata.read_text(encoding="utf-8"))
    if found is None:
        sys.exit(f"{tree.name} does not ask for one minor version of PyTorch")
    return found[1], metadata


def check_same(first: Path, other: Path, native: list[Path]) -> None:
    """Exit if two wheels differ in more than their native parts, as those of two commits do."""
    for path in sorted(other.glob("tvmify/**/*")):
        if path.is_dir() or any(path.is_relative_to(part) for part in native):
            continue
        twin = first / path.relative_to(other)
        if not twin.exists() or twin.read_bytes() != path.read_bytes():
            sys.exit(f"{path.relative_to(other)} differs: build all wheels from one commit")


def requirement(versions: list[str]) -> str:
    """Return the requirement for pip: the range of these versions, without missing ones."""
    supported = [row.version for row in runpy.run_path(str(VERSIONS))["TORCH"]]
    places = sorted(supported.index(version) for version in versions)
    major, _, last = supported[places[-1]].partition(".")
    missing = [supported[i] for i in range(places[0], places[-1]) if i not in places]
    parts = [f">={supported[places[0]]}", f"<{major}.{int(last) + 1}"]
    return f"torch{','.join([*parts, *(f'!={version}.*' for version in missing)])}"


if __name__ == "__main__":
    main(*sys.argv[1:])
