"""What a program writes to its arguments and to the tensors of its module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from tvmify.artifact.expressions import expect
from tvmify.artifact.results import Argument, Computed, Result, StateTensor

#: What a program may write to.
Writable: TypeAlias = Argument | StateTensor


@dataclass(frozen=True)
class Write:
    """A computed tensor, and the target that it is copied into after the program has run."""

    target: Writable
    source: Computed

    def __post_init__(self) -> None:
        expect(isinstance(self.target, Writable), f"a write to {self.target!r:.50}")
        expect(isinstance(self.source, Computed), f"a write of {self.source!r:.50}")

    def to_json(self) -> list[Any]:
        """Return values that JSON can hold: those of its two fields."""
        return [self.target.to_json(), self.source.to_json()]

    @classmethod
    def from_json(cls, value: Any) -> Write:
        """Read what `to_json` returned; it may come from anywhere.

        Raises
        ------
        TypeError, ValueError
            It does not describe a write.
        """
        target, source = value
        return cls(Result.from_json(target), Result.from_json(source))  # type: ignore[arg-type]  # checked
