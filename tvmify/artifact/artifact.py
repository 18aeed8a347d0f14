"""What the compiler makes, the disk cache keeps and the executor runs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from tvmify.artifact import validation
from tvmify.artifact.results import Argument, Result, StateTensor
from tvmify.artifact.shapes import Shapes
from tvmify.artifact.verdicts import Seconds, VerdictKey
from tvmify.artifact.writes import Writable, Write

#: Increment when the meaning of a field or the calling convention of the library changes.
FORMAT_VERSION = 8

#: The function of the runtime by which a compiled program calls PyTorch's operators.
CALL_OF_TORCH = "tvmify.aten"


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
        What each leaf of the result is.
    output_structure
        The pytree of the result, as `tvmify.artifact.structure.structure_text` writes it.
    state
        Dotted names of the module's tensors that each call reads afresh, because the program writes
        to them or returns them.
    writes
        The computed tensors that are copied into arguments or ``state`` after ``main`` has run.
    complex
        Which of the tensors that ``main`` returns hold complex numbers, as pairs along a last axis.
    needs_contiguous
        Arguments and tensors of ``state`` for which it computes, shares and writes what eager
        PyTorch does only if they are contiguous.
    draws
        The qualified names of its operators that draw random numbers.
    shapes
        The shapes that it serves; None if it serves one signature.
    verdicts
        Times of compiled code and eager PyTorch, by how calls ran, where the two were compared (see
        `tvmify.dispatch.verdict`).
    report
        What ``explain()`` says and nothing else reads: kernels and their schedule rules,
        operators, seconds per stage.
    """

    library: bytes
    target: str
    inputs: tuple[int, ...]
    weights: tuple[str, ...]
    packed: tuple[str, ...]
    outputs: tuple[Result, ...]
    output_structure: str
    state: tuple[str, ...] = ()
    writes: tuple[Write, ...] = ()
    complex: tuple[int, ...] = ()
    needs_contiguous: tuple[Writable, ...] = ()
    draws: tuple[str, ...] = ()
    shapes: Shapes | None = None
    verdicts: dict[VerdictKey, Seconds] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def calls_torch(self) -> bool:
        """Whether the program has calls of PyTorch's operators, which its version may change."""
        # Their name is among those that TVM's virtual machine looks up, wherever they come from:
        # operators without a converter, products that a library computes.
        return CALL_OF_TORCH.encode() in self.library

    @property
    def strides_matter(self) -> bool:
        """Whether it does not serve some arguments that are not contiguous."""
        return bool(self.needs_contiguous) or self.draws_in_order

    @property
    def draws_in_order(self) -> bool:
        """Whether it serves contiguous arguments only: PyTorch draws in the order of memory, so
        that strides decide which element gets which number.
        """
        return bool(self.draws)

    def written_names(self) -> str:
        """Return what a call writes to, for messages."""
        targets = (write.target for write in self.writes)
        return ", ".join(
            repr(self.state[target.index]) if isinstance(target, StateTensor) else str(target)
            for target in targets
        )

    def written_state(self) -> set[str]:
        """Return the names of the tensors of the module that a call writes to."""
        targets = (write.target for write in self.writes)
        return {self.state[t.index] for t in targets if isinstance(t, StateTensor)}

    def written_arguments(self) -> set[int]:
        """Return which leaves of the arguments a call writes to."""
        targets = (write.target for write in self.writes)
        return {target.leaf for target in targets if isinstance(target, Argument)}

    def unsaved_effect(self) -> str | None:
        """Return which effect of a call a saved file does not support, if there is one."""
        if self.writes:
            return f"forward writes to {self.written_names()}"
        if self.state:
            names = ", ".join(map(repr, self.state))
            return f"forward returns {names}, or a view of it, or depends on its strides"
        return None

    def description(self) -> dict[str, Any]:
        """Return every field but the library as values that JSON can hold."""
        # Without shapes and complex results it is what versions that know none read and write.
        left_out = {"library", "shapes", "complex"}
        names = (f.name for f in dataclasses.fields(self) if f.name not in left_out)
        return {name: getattr(self, name) for name in names} | {
            "outputs": [result.to_json() for result in self.outputs],
            "writes": [write.to_json() for write in self.writes],
            "needs_contiguous": [tensor.to_json() for tensor in self.needs_contiguous],
            "verdicts": {key.to_json(): seconds for key, seconds in self.verdicts.items()},
            **({} if self.shapes is None else {"shapes": self.shapes.to_json()}),
            **({"complex": self.complex} if self.complex else {}),
        }

    @classmethod
    def from_description(cls, library: bytes, description: dict[str, Any]) -> Artifact:
        """Rebuild an artifact; the inverse of `description`.

        Raises
        ------
        AttributeError, KeyError, TypeError, ValueError
            A field is missing, unknown or of the wrong type, or holds an index out of range.
        """
        fields = dict(description)
        for name in ("inputs", "weights", "packed", "state", "draws"):
            fields[name] = tuple(fields[name])
        fields["outputs"] = tuple(map(Result.from_json, fields["outputs"]))
        fields["writes"] = tuple(map(Write.from_json, fields["writes"]))
        fields["complex"] = tuple(fields.get("complex", ()))
        fields["needs_contiguous"] = tuple(map(Result.from_json, fields["needs_contiguous"]))
        if "shapes" in fields:
            fields["shapes"] = Shapes.from_json(fields["shapes"])
        verdicts = ((VerdictKey.from_json(t), times) for t, times in fields["verdicts"].items())
        fields["verdicts"] = {key: Seconds(*times) for key, times in verdicts if key is not None}
        artifact = cls(library=library, **fields)
        validation.check(artifact)
        return artifact

    def metadata(self) -> str:
        """Return `description` with the format version, as canonical JSON."""
        return json.dumps({"format": FORMAT_VERSION} | self.description(), sort_keys=True)
