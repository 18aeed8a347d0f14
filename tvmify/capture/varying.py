"""Which sizes of a call may differ from call to call, and recording a program for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Varying:
    """Sizes of a call's tensors that stand for any size.

    Attributes
    ----------
    axes
        For each tensor with such sizes, by its number among the flattened arguments: for each axis
        the name of a symbol, or None where the size stays as it is. Sizes of one name are equal in
        all calls.
    limits
        The least and the greatest value of a symbol, where a program is to know them.
    hints
        What to tune for, by symbol.
    variant
        How many programs for the same symbols are to be passed over: those whose guards refuse
        the sizes of the call.
    """

    axes: Mapping[int, tuple[str | None, ...]]
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    hints: Mapping[str, int] = field(default_factory=dict)
    variant: int = 0

    def __hash__(self) -> int:
        return hash((self.key_text(), tuple(sorted(self.axes.items()))))

    def key_text(self) -> str:
        """Return all but the places of the symbols, as part of a key."""
        limits = (
            f"{least} <= {name} <= {most}" for name, (least, most) in sorted(self.limits.items())
        )
        hints = (f"{name} is about {hint}" for name, hint in sorted(self.hints.items()))
        return "\n".join([*limits, *hints, f"variant {self.variant}"])

    def hints_by_place(self) -> dict[tuple[int, int], int]:
        """Return the hints by tensor and axis."""
        places = self.places()
        return {place: hint for name, hint in self.hints.items() for place in places[name]}

    def places(self) -> dict[str, list[tuple[int, int]]]:
        """Return for each symbol the tensors and axes where it stands."""
        found: dict[str, list[tuple[int, int]]] = {}
        for leaf, names in sorted(self.axes.items()):
            for axis, name in enumerate(names):
                if name is not None:
                    found.setdefault(name, []).append((leaf, axis))
        return found


def dynamic_shapes(args: Any, kwargs: Any, varying: Varying) -> Any:
    """Return what ``torch.export`` takes, for arguments each of which is a tensor of its own."""
    from torch.export import Dim, ShapesCollection

    shapes = ShapesCollection()
    leaves = pytree.tree_leaves((args, kwargs))
    for leaf, names in varying.axes.items():
        # Dim.AUTO never fails: what a program says about sizes becomes a guard.
        shapes[leaves[leaf]] = {
            axis: Dim.STATIC if name is None else Dim.AUTO for axis, name in enumerate(names)
        }
    return shapes


def check_sizes(leaves: Sequence[Any], varying: Varying | None) -> None:
    """Record, in a call that is recorded, that sizes of one name are equal and in their limits.

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
