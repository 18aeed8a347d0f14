"""Validation of artifacts, whose manifests may come from untrusted files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tvmify.artifact.expressions import expect
from tvmify.artifact.geometry import check_indices
from tvmify.artifact.results import Result, computed_count
from tvmify.artifact.writes import Writable, Write

if TYPE_CHECKING:
    from tvmify.artifact import Artifact


def check(artifact: Artifact) -> None:
    """Check the types of all fields and, as far as possible, the indices in them.

    Raises
    ------
    TypeError, ValueError
        A field has another type than `Artifact` says, or holds an index out of range.
    """
    for name in ("target", "output_structure"):
        expect(isinstance(getattr(artifact, name), str), f"{name} is not a string")
    for name in ("weights", "packed", "state", "draws"):
        expect(
            all(isinstance(text, str) for text in getattr(artifact, name)),
            f"{name} are not strings",
        )
    for tensor in artifact.needs_contiguous:
        expect(isinstance(tensor, Writable), f"{tensor!r:.50} is never contiguous")
        tensor.check(0, len(artifact.state))
    expect(isinstance(artifact.report, dict), "report is not a dict")
    check_indices(*artifact.inputs, *artifact.complex)
    written = (write.source.index + 1 for write in artifact.writes)
    computed = max([computed_count(artifact.outputs), *written])
    for index in artifact.complex:
        expect(index < computed, f"there is no complex tensor {index} of {computed}")
    _check_verdicts(artifact.verdicts)
    symbols = {symbol.name for symbol in artifact.shapes.symbols} if artifact.shapes else set()
    for output in artifact.outputs:
        expect(output.symbols() <= symbols, "a result has a symbol that is not in shapes")
    check_references(artifact.outputs, artifact.writes, len(artifact.state))


def check_references(results: Iterable[Result], writes: Iterable[Write], states: int) -> None:
    """Check what results and writes refer to, as far as that is known before a call.

    The numbers of arguments and of computed tensors are only known when the program is called.

    Parameters
    ----------
    results, writes
        Of one program.
    states
        The number of names in ``Artifact.state``.

    Raises
    ------
    ValueError
        One of them refers to something that does not exist.
    """
    for position, result in enumerate(results):
        result.check(position, states)
    for write in writes:
        write.target.check(0, states)


def _check_verdicts(verdicts: Mapping[Any, Iterable[Any]]) -> None:
    for pair in verdicts.values():
        # type(), because a bool is an int, too.
        expect(all(type(seconds) in (int, float) for seconds in pair), "seconds are not a number")
