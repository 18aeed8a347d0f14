"""The sizes that may differ between calls, and how a program is recorded for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Varying:
    """The symbolic sizes of a call's tensors.

    Attributes
    ----------
    axes
        For each tensor with symbolic sizes, by its index among the flattened arguments: the name of
        a symbol for each axis, or None for a fixed size. Sizes of one name are equal in all calls.
    limits
        The least and greatest value of a symbol, if the program should know them.
    typical
        The size to tune for, by symbol, if it does not depend on the call.
    hints
        The size to tune for, by symbol.
    variant
        How many programs for the same symbols to skip, since their guards refuse the sizes of the
        call.
    """

    axes: Mapping[int, tuple[str | None, ...]]
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    typical: Mapping[str, int] = field(default_factory=dict)
    hints: Mapping[str, int] = field(default_factory=dict)
    variant: int = 0

    def __hash__(self) -> int:
        return hash((self.key_text(), tuple(sorted(self.axes.items()))))

    def key_text(self) -> str:
        """Return everything but the axes, as part of a key."""
        limits = (
            f"{least} <= {name} <= {most}" for name, (least, most) in sorted(self.limits.items())
        )
        hints = (f"{name} is about {hint}" for name, hint in sorted(self.hints.items()))
        return ", ".join([*limits, *hints, f"variant {self.variant}"])

    def hints_by_place(self) -> dict[tuple[int, int], int]:
        """Return the hints by tensor and axis."""
        places = self.places()
        return {place: hint for name, hint in self.hints.items() for place in places[name]}

    def recorded(self) -> Varying:
        """Return what a recording depends on: programs that differ in their hints share one."""
        return replace(self, hints={})

    def places(self) -> dict[str, list[tuple[int, int]]]:
        """Return the tensors and axes of each symbol."""
        found: dict[str, list[tuple[int, int]]] = {}
        for leaf, names in sorted(self.axes.items()):
            for axis, name in enumerate(names):
                if name is not None:
                    found.setdefault(name, []).append((leaf, axis))
        return found


def shapes_of(leaves: Sequence[Any], varying: Varying | None) -> tuple[Any, ...]:
    """Describe the leaves of a call, with the names of symbols in place of sizes that may vary."""
    axes = {} if varying is None else varying.axes

    def described(place: int, leaf: Any) -> tuple[Any, ...]:
        if not isinstance(leaf, torch.Tensor):
            return type(leaf), leaf
        names = axes.get(place, (None,) * leaf.ndim)
        shape = tuple(
            size if name is None else name for size, name in zip(leaf.shape, names, strict=True)
        )
        return leaf.dtype, shape, leaf.device

    return tuple(described(place, leaf) for place, leaf in enumerate(leaves))


def dynamic_shapes(args: Any, kwargs: Any, varying: Varying) -> Any:
    """Return the ``dynamic_shapes`` of ``torch.export`` for arguments that are all tensors."""
    from torch.export import Dim, ShapesCollection

    shapes = ShapesCollection()
    leaves = pytree.tree_leaves((args, kwargs))
    for leaf, names in varying.axes.items():
        # Dim.AUTO never fails: what a program assumes about sizes becomes a guard.
        shapes[leaves[leaf]] = {
            axis: Dim.STATIC if name is None else Dim.AUTO for axis, name in enumerate(names)
        }
    return shapes


def check_sizes(leaves: Sequence[Any], varying: Varying | None) -> None:
    """Record, inside a recorded call, that sizes of one name are equal and within their limits.

    Parameters
    ----------
    leaves
        The flattened arguments of the call.
    varying
        None if all sizes are static.
    """
    if varying is None:
        return
    for name, places in varying.places().items():
        sizes = [leaves[leaf].shape[axis] for leaf, axis in places]
        for other in sizes[1:]:
            torch._check(other == sizes[0])
        if name in varying.limits:
            least, most = varying.limits[name]
            torch._check(sizes[0] >= least)
            torch._check(sizes[0] <= most)
