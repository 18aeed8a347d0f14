"""Which sizes of a call may differ from call to call, and recording a program for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

#: The largest size that a symbol stands for. Products of sizes have guards of their own.
LARGEST = 2**31 - 1
#: The least size: of 0 and 1, programs of their own know more.
LEAST = 2


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
        The least and the greatest value of a symbol, where that is not `LEAST` and `LARGEST`.
    """

    axes: Mapping[int, tuple[str | None, ...]]
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def shape_text(self, leaf: int, shape: tuple[int, ...]) -> str:
        """Return a shape with symbols, as part of a key."""
        names = self.axes.get(leaf, (None,) * len(shape))
        sizes = (
            str(size) if name is None else name for size, name in zip(shape, names, strict=True)
        )
        return f"[{', '.join(sizes)}]"

    def key_text(self) -> str:
        """Return the limits of the symbols, as part of a key."""
        return ", ".join(
            f"{least} <= {name} <= {most}" for name, (least, most) in sorted(self.limits.items())
        )

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
