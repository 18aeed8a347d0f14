"""Which calls a symbolic program serves, decided in native code."""

from __future__ import annotations

from typing import Any

from tvmify.artifact.shapes import Shapes
from tvmify.runtime import native


class ShapeGuard:
    """Decides as `Shapes.solve` does, in microseconds.

    Parameters
    ----------
    shapes
        The shapes that the program serves.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self._native = native.ShapeGuard(shapes.to_text())

    def serves(self, leaves: tuple[Any, ...]) -> bool:
        """Whether the program serves a call with these leaves, tensors among them."""
        return self._native.serves(leaves)

    def solve(self, leaves: tuple[Any, ...]) -> tuple[int, ...] | None:
        """Return the values of the symbols, in order; None if the program does not serve it."""
        return self._native.solve(leaves)
