"""The entry points of pyproject.toml, for processes whose installation may be older."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SECTION = re.compile(r"^\[project\.entry-points\.(\w+)\]\n((?:.+\n)+)", re.MULTILINE)


def entry_points(folder: Path) -> Path:
    """Write the metadata of a package with these entry points; return the folder for sys.path."""
    sections = _SECTION.findall((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert sections
    place = folder / "entry_points" / "tvmify_of_this_checkout-0.dist-info"
    place.mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: tvmify-of-this-checkout\nVersion: 0\n"
    (place / "METADATA").write_text(metadata, encoding="utf-8")
    text = "\n".join(f"[{group}]\n{names}" for group, names in sections).replace('"', "")
    (place / "entry_points.txt").write_text(text, encoding="utf-8")
    return place.parent
