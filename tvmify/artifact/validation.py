"""Whether the description of a compiled program describes one: it may come from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tvmify.artifact import results

if TYPE_CHECKING:
    from tvmify.artifact import Artifact


def check(artifact: Artifact) -> None:
    """Look at the kinds of all fields, and at what can be known of the indices in them.

    Raises
    ------
    TypeError, ValueError
        A field is of another kind than `Artifact` says, or counts further than another has.
    """
    for name in ("target", "output_structure"):
        _expect(isinstance(getattr(artifact, name), str), f"{name} is no text")
    for name in ("weights", "packed", "state", "draws"):
        _expect(all(isinstance(text, str) for text in getattr(artifact, name)), f"{name}: no texts")
    _expect(isinstance(artifact.needs_contiguous, bool), "needs_contiguous is no bool")
    _expect(isinstance(artifact.report, dict), "report is no dict")
    results.check_indices(*artifact.inputs)
    _check_verdicts(artifact.verdicts)
    results.validate(artifact.outputs, artifact.writes, len(artifact.state))


def _check_verdicts(verdicts: Mapping[Any, Iterable[Any]]) -> None:
    for threads, pair in verdicts.items():
        _expect(isinstance(threads, str), "a number of threads is no text")
        # A bool, too, is an int.
        _expect(all(type(seconds) in (int, float) for seconds in pair), "seconds are no number")


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
