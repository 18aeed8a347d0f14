"""The sizes that may differ between calls, and how a program is recorded for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tvmify.artifact.shapes import Axis
from tvmify.signature import SizeArgument

#: The name of a symbol, or None, for each axis of a tensor; by its index among the leaves.
Symbols = Mapping[int, tuple[str | None, ...]]
#: The sizes of each tensor among the leaves of a call; None for other leaves.
TensorSizes = tuple[tuple[int, ...] | None, ...]


class Limits(NamedTuple):
    """The least and the greatest value of a symbol."""

    least: int
    most: int


@dataclass(frozen=True)
class Varying:
    """The symbolic sizes of a call's tensors; none in `STATIC`.

    Attributes
    ----------
    axes
        For each tensor with symbolic sizes, by its index among the flattened arguments: the name of
        a symbol for each axis, or None for a fixed size. Sizes of one name are equal in all calls.
    limits
        By symbol, where the program should know them.
    typical
        The size to tune for, by symbol, if it does not depend on the call.
    hints
        The size to tune for, by symbol.
    variant
        How many programs for the same symbols to skip, since their guards refuse the sizes of the
        call.
    """

    axes: Symbols = field(default_factory=dict)
    limits: Mapping[str, Limits] = field(default_factory=dict)
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

    def hints_by_axis(self) -> dict[Axis, int]:
        """Return the hints by axis."""
        axes = self.axes_by_symbol()
        return {axis: hint for name, hint in self.hints.items() for axis in axes[name]}

    def recorded(self) -> Varying:
        """Return what a recording depends on: programs that differ in their hints share one."""
        return replace(self, hints={})

    def axes_by_symbol(self) -> dict[str, list[Axis]]:
        """Return the axes of each symbol."""
        found: dict[str, list[Axis]] = {}
        for leaf, names in sorted(self.axes.items()):
            for number, name in enumerate(names):
                if name is not None:
                    found.setdefault(name, []).append(Axis(leaf, number))
        return found


#: All sizes are static.
STATIC = Varying()


def sizes_of(leaves: Sequence[Any]) -> TensorSizes:
    """Return the sizes of each tensor among the leaves of a call, and of what replaces ints."""
    leaves = [x.carrier(x.value) if isinstance(x, SizeArgument) else x for x in leaves]
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves)


def shapes_of(leaves: Sequence[Any], varying: Varying) -> tuple[Any, ...]:
    """Describe the leaves of a call, with the names of symbols in place of sizes that may vary."""

    def described(place: int, leaf: Any) -> tuple[Any, ...]:
        if not isinstance(leaf, torch.Tensor):
            return type(leaf), leaf
        names = varying.axes.get(place, (None,) * leaf.ndim)
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


def check_sizes(leaves: Sequence[Any], varying: Varying) -> None:
    """Record, inside a recorded call, that sizes of one name are equal and within their limits.

    Parameters
    ----------
    leaves
        The flattened arguments of the call.
    """
    for name, axes in varying.axes_by_symbol().items():
        sizes = [leaves[axis.leaf].shape[axis.number] for axis in axes]
        for other in sizes[1:]:
            torch._check(other == sizes[0])
        if name in varying.limits:
            limits = varying.limits[name]
            torch._check(sizes[0] >= limits.least)
            torch._check(sizes[0] <= limits.most)
