"""Files and links that the documentation names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: Paths are relative to one of these: documents leave out prefixes that are clear from context.
BASES = [ROOT / base for base in ("", "tvmify", "tvmify/compiler", "tvmify/compiler/kernels")]
PATH = re.compile(r"(?<![\w./<-])(?:\w+/)+\w+\.(?:py|cpp|h|toml)\b")
#: Headers of other projects, and files that the page about rules tells its reader to write.
OTHERS = {
    "torch/script.h",
    "tvm/support/io.h",
    "tvmify/compiler/kernels/reduction/product.py",
    "tests/compiler/kernels/reduction/test_product.py",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    code = re.findall(r"`[^`\n]+`", page.read_text(encoding="utf-8"))
    named = {path for text in code for path in PATH.findall(text)} - OTHERS
    missing = {path for path in named if not any((base / path).exists() for base in BASES)}
    assert not missing


def test_pages_name_files() -> None:
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert len(PATH.findall(text)) > 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_headings(page: Path) -> None:
    """`make docs` checks the links of the site only, without the README and other files."""
    links = re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8"))
    for path, anchor in links:
        file = page.parent / path if path else page
        assert file.exists(), path
        if anchor:
            assert anchor in _anchors(file), f"{path}#{anchor}"


def _anchors(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*?)(?: \{.*\})?$", text, re.MULTILINE)
    slugs = {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }
    return slugs | set(re.findall(r'(?:\bid="|\{ #)([^" }]+)', text))
