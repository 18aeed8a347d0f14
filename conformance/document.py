"""Writes the results of this package's commands into ``docs/coverage.md``."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "coverage.md"


def replace_section(name: str, text: str, document: Path = DOCUMENT) -> None:
    """Replace the text between the two comments that mark a section of the document.

    Raises
    ------
    ValueError
        The document has no such section.
    """
    begin, end = (f"<!-- {name}: {word} -->\n" for word in ("begin", "end"))
    before, found, rest = document.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{document} has no section between {begin!r} and {end!r}")
    document.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}")
