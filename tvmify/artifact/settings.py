"""What the compiler is told about a program, besides its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmify.artifact.shapes import Shapes


@dataclass(frozen=True)
class BuildSettings:
    """What the compiler is told about a program, besides its target.

    Attributes
    ----------
    accuracy
        ``"default"`` or ``"strict"``, see `tvmify.options.CompileOptions`.
    unpacked
        Names of weights that may change between two calls; they become `Artifact.state`.
    shapes
        The shapes that the program serves according to its recording, if sizes are symbols. The
        artifact's shapes include the guards from the translation.
    scratch_directories
        Directories for temporary files if the usual one is full.
    """

    accuracy: str = "default"
    unpacked: tuple[str, ...] = ()
    shapes: Shapes | None = None
    scratch_directories: tuple[Path, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return values that JSON can express."""
        return {
            "accuracy": self.accuracy,
            "unpacked": self.unpacked,
            "shapes": None if self.shapes is None else self.shapes.to_json(),
            "scratch_directories": list(map(str, self.scratch_directories)),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BuildSettings:
        """Read what `to_json` returned."""
        shapes = values["shapes"]
        return cls(
            values["accuracy"],
            tuple(values["unpacked"]),
            None if shapes is None else Shapes.from_json(shapes),
            tuple(map(Path, values["scratch_directories"])),
        )
