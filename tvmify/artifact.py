"""What the compiler makes, the disk cache keeps and the executor runs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from tvmify import wellformed

#: Raised whenever the meaning of a field, or the calling convention of the library, changes.
FORMAT_VERSION = 5


@dataclass(frozen=True)
class Artifact:
    """One compiled program: a shared library and the description of how to call it.

    The library exports two functions of TVM's Relax virtual machine. ``main`` takes the tensors of
    ``inputs``, those of ``state`` and the packed weights; it returns the tensors of the program, in
    order. ``pack`` takes the tensors of ``weights`` and returns the packed weights; it exists only
    when ``packed`` is not empty.

    Attributes
    ----------
    library
        The bytes of the shared library.
    target
        What it was built for, as the text of a `tvmify.target.Target`.
    inputs
        For each tensor that ``main`` takes first: the index of its leaf among the flattened
        arguments of the call.
    weights
        Dotted names of the parameters, buffers and tensor attributes that ``pack`` takes.
    packed
        For each packed weight a text that is equal for two artifacts exactly when they pack the
        same weights in the same way, so that one copy serves both.
    outputs
        For each leaf of the result: ``["tensor", i]`` (the i-th tensor ``main`` returns),
        ``["argument", i]`` (the i-th leaf of the arguments, returned as it came), ``["state", i]``
        (the same of ``state``), ``["constant", value]``, ``["same", i]`` (the i-th leaf of the
        result again), or ``["view", [kind, i, sizes, strides, offset]]`` of one of the first three
        kinds, in elements from its first one.
    output_structure
        The pytree of the result, as `tvmify.structure.structure_text` writes it.
    state
        Dotted names of the tensors of the module that a call takes as they are at that moment,
        because the program writes to them or returns them.
    writes
        ``[kind, i, j]``: when ``main`` has run, its j-th tensor is copied into the i-th leaf of the
        arguments (``"argument"``) or of ``state`` (``"state"``).
    needs_contiguous
        Which memory results share, or what is written to, is so only for contiguous arguments.
    verdicts
        For each number of threads, as a text, the seconds of a call when compiled and in eager
        PyTorch (see `tvmify.verdict`), as far as they were compared.
    report
        What ``explain()`` prints and nothing else reads: kernels and their schedule rules,
        operators, seconds per stage.
    """

    library: bytes
    target: str
    inputs: tuple[int, ...]
    weights: tuple[str, ...]
    packed: tuple[str, ...]
    outputs: tuple[tuple[str, Any], ...]
    output_structure: str
    state: tuple[str, ...] = ()
    writes: tuple[tuple[str, int, int], ...] = ()
    needs_contiguous: bool = False
    verdicts: dict[str, tuple[float, float]] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    def written_names(self) -> str:
        """Return what a call writes to, for messages; empty if it only computes."""
        return ", ".join(
            repr(self.state[i]) if kind == "state" else f"leaf {i} of the arguments"
            for kind, i, _ in self.writes
        )

    def effects(self) -> str:
        """Return what a file cannot do for a call yet, as a text; empty if there is nothing."""
        if self.writes:
            return f"forward writes to {self.written_names()}"
        if self.state:
            return f"forward returns {', '.join(map(repr, self.state))}, or a view of it"
        return ""

    def description(self) -> dict[str, Any]:
        """Return every field but the library as values that JSON can hold."""
        names = (f.name for f in dataclasses.fields(self) if f.name != "library")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_description(cls, library: bytes, description: dict[str, Any]) -> Artifact:
        """Rebuild an artifact; the inverse of `description`.

        Raises
        ------
        AttributeError, KeyError, TypeError, ValueError
            A field is missing, unknown or of the wrong kind, or counts further than another has.
        """
        fields = dict(description)
        for name in ("inputs", "weights", "packed", "state"):
            fields[name] = tuple(fields[name])
        fields["writes"] = tuple((kind, i, j) for kind, i, j in fields["writes"])
        fields["outputs"] = tuple((kind, _frozen(value)) for kind, value in fields["outputs"])
        verdicts = fields["verdicts"].items()
        fields["verdicts"] = {threads: tuple(seconds) for threads, seconds in verdicts}
        artifact = cls(library=library, **fields)
        wellformed.check(artifact)
        return artifact

    def metadata(self) -> str:
        """Return `description` with the format version, as canonical JSON."""
        return json.dumps({"format": FORMAT_VERSION} | self.description(), sort_keys=True)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value
