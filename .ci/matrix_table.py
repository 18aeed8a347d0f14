"""Update the table in ``docs/versions.md`` from ``build/matrix/results.tsv``.

    python .ci/matrix_table.py build/matrix/results.tsv docs/versions.md

The last result of a row replaces the row in the table; rows without a result stay.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

HEAD = "| row | PyTorch | Python | tests | result | date | commit | minutes |"


class Run(NamedTuple):
    """A line of the results, with fields in the order of `.ci/matrix`."""

    row: str
    torch: str
    python: str
    tests: str
    outcome: str
    date: str
    commit: str
    minutes: str

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"


def updated(page: str, runs: list[Run]) -> str:
    """Return a page with its table updated."""
    lines = page.splitlines()
    start = lines.index(HEAD) + 2
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines[start:]))
    table = [Run(*(cell.strip() for cell in line.strip("|").split("|"))) for line in rows]
    newest = {run.row: run for run in [*table, *runs]}
    return "\n".join([*lines[:start], *map(str, newest.values()), *lines[start + len(rows) :], ""])


def main(results: str, page: str) -> None:
    """Rewrite the page."""
    lines = Path(results).read_text(encoding="utf-8").splitlines()
    runs = [Run(*line.split("\t")) for line in lines]
    path = Path(page)
    path.write_text(updated(path.read_text(encoding="utf-8"), runs), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
