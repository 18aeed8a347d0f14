"""The results of an interrupted run, so that the next one can continue it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.results import Result

_FIELDS = {field.name for field in dataclasses.fields(Result)}


class Unfinished:
    """The results so far, in a file that is rewritten after each model and removed at the end.

    Parameters
    ----------
    path
        The file. Its contents are used only if they were measured with equal ``settings``.
    settings
        What results depend on besides the model and the number of threads, as JSON values.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self._settings = path, settings
        self._results: list[Result] = []
        if path.exists():
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["settings"] == settings:
                self._results = [_result(found) for found in record["results"]]

    def of(self, model: str, threads: int) -> list[Result]:
        """Return the results of all contenders on a model, empty if it was not measured yet."""
        return [r for r in self._results if (r.model, r.threads) == (model, threads)]

    def add(self, results: list[Result]) -> None:
        """Store the results on one model."""
        self._results += results
        self.path.parent.mkdir(parents=True, exist_ok=True)
        records = [result.record() for result in self._results]
        text = json.dumps({"settings": self._settings, "results": records}, indent=2)
        # Renamed, so that an interruption leaves a complete file.
        new = self.path.with_suffix(".new")
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(self.path)

    def finish(self) -> None:
        """Remove the file, so that the next run starts over."""
        self.path.unlink(missing_ok=True)


def _result(record: dict[str, Any]) -> Result:
    return Result(**{name: value for name, value in record.items() if name in _FIELDS})


def commit() -> str:
    """Return the measured commit, marked if files differ from it; empty outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()
