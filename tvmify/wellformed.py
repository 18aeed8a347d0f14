"""Whether the description of a compiled program describes one: it may come from anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvmify.artifact import Artifact

#: More leaves, tensors or elements than there are: what native code counts with has 64 bits.
_TOO_MANY = 1 << 62


def check(artifact: Artifact) -> None:
    """Look at the kinds of all fields, and at what can be known of the indices in them.

    Raises
    ------
    TypeError, ValueError
        A field is of another kind than `Artifact` says, or counts further than another has.
    """
    for name in ("target", "output_structure"):
        _expect(isinstance(getattr(artifact, name), str), f"{name} is no text")
    for name in ("weights", "packed", "state"):
        _expect(all(isinstance(text, str) for text in getattr(artifact, name)), f"{name}: no texts")
    _expect(isinstance(artifact.needs_contiguous, bool), "needs_contiguous is no bool")
    _expect(isinstance(artifact.report, dict), "report is no dict")
    _indices(artifact.inputs, "inputs")
    _check_verdicts(artifact.verdicts)
    for number, (kind, value) in enumerate(artifact.outputs):
        if kind == "view":
            kind, value, sizes, strides, offset = value
            # Where it begins is counted from where its base does, which may be later.
            _indices((*sizes, *strides, abs(offset)), "a view")
            _expect(len(sizes) == len(strides), "a view has not a stride for each size")
            _expect(kind in ("tensor", "argument", "state"), f"a view of {kind!r:.50}")
        if kind != "constant":
            _check_place(kind, value, len(artifact.state), number)
    for kind, target, tensor in artifact.writes:
        _expect(kind in ("argument", "state"), f"a write to {kind!r:.50}")
        _check_place(kind, target, len(artifact.state), 0)
        _indices((tensor,), "writes")


def _check_place(kind: Any, index: Any, states: int, earlier: int) -> None:
    _indices((index,), str(kind))
    # How many there are of the others is seen when the program is called.
    most = {"tensor": _TOO_MANY, "argument": _TOO_MANY, "state": states, "same": earlier}
    _expect(kind in most, f"an output of the kind {kind!r:.50}")
    _expect(index < most[kind], f"there is no {kind} {index}")


def _check_verdicts(verdicts: dict[Any, tuple[Any, ...]]) -> None:
    for threads, pair in verdicts.items():
        _expect(isinstance(threads, str) and len(pair) == 2, "a verdict is no pair of seconds")
        # A bool, too, is an int.
        _expect(all(type(seconds) in (int, float) for seconds in pair), "seconds are no number")


def _indices(values: Iterable[Any], name: str) -> None:
    for value in values:
        _expect(type(value) is int and 0 <= value < _TOO_MANY, f"{name}: {value!r:.50} is no index")


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
