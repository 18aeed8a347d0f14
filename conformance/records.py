"""The results so far: a line of JSON for each case, in files that are only appended to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.operators import Case, Result


def append(file: Path, case: Case, result: Result) -> None:
    """Append the result of a case."""
    record = dataclasses.asdict(case) | dataclasses.asdict(result)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


def read(folder: Path) -> dict[Case, Result]:
    """Return all results in a folder; if a case is there twice, one of the two."""
    return {
        case: result
        for file in sorted(folder.glob("*.jsonl"))
        for case, result in map(_parse, _records(file))
    }


def forget(folder: Path, drop: Callable[[Case, Result], bool]) -> None:
    """Remove the results that `drop` selects, so that the next run repeats them."""
    for file in folder.glob("*.jsonl"):
        kept = [record for record in _records(file) if not drop(*_parse(record))]
        file.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")


def _records(file: Path) -> list[dict[str, Any]]:
    # The last line lacks its end if the process was killed while it wrote; that case runs again.
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _parse(record: dict[str, Any]) -> tuple[Case, Result]:
    names = [field.name for field in dataclasses.fields(Case)]
    return (
        Case(*(record[name] for name in names)),
        Result(**{name: value for name, value in record.items() if name not in names}),
    )
