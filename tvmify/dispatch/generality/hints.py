"""What the programs of each class of sizes are tuned for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import isqrt, prod
from typing import TYPE_CHECKING

from tvmify.artifact.shapes import Axis, Shapes
from tvmify.capture import Symbols, TensorSizes, Varying

if TYPE_CHECKING:
    from torch.export import ExportedProgram

#: For each class: the largest product of all symbols, and the product that its program is tuned
#: for. Measured on matrix products with that many rows: docs/measurements/shapes.md.
CLASSES = ((64, 48), (256, 128), (2**62, 512))
#: What is tuned for, whatever the lengths: the tokens of a prompt, and those in a cache of keys and
#: values. Programs for more lengths would gain little: docs/measurements/shapes.md.
TYPICAL_PROMPT, TYPICAL_CACHE = 48, 256
#: Height and width of images that the last class is tuned for: networks halve them several times.
_SIDE = 224


def hints_of_class(values: Mapping[str, int], sides: frozenset[str]) -> dict[str, int]:
    """Return what to tune for, for calls of one class.

    Parameters
    ----------
    values
        The sizes of one of these calls, by symbol. The last symbol, the length of sequences, gets
        the largest part of the product that the class is tuned for.
    sides
        The symbols that are heights and widths of images, which get equal parts.
    """
    count = prod(values.values())
    hint = next((hint for most, hint in CLASSES if count <= most), CLASSES[-1][1])
    names = list(values)
    if sides.intersection(names):
        side = _SIDE if hint == CLASSES[-1][1] else isqrt(hint)
        return {name: side if name in sides else 2 for name in names}
    if len(names) < 2:
        return dict.fromkeys(names, hint)
    smallest = 2 if hint <= 64 else 4
    rest = max(2, hint // smallest ** (len(names) - 1))
    return dict.fromkeys(names[:-1], smallest) | {names[-1]: rest}


def tuned(varying: Varying, sizes: TensorSizes, numbers: Collection[str] = ()) -> Varying:
    """Return the same sizes with the hints of the class of a call.

    Parameters
    ----------
    sizes
        The sizes of the call.
    numbers
        Symbols that the program does not have; see `numbers`. They do not count towards the
        class, and have no hints.
    """
    values = {
        name: size
        for leaf, names in varying.axes.items()
        for name, size in zip(names, sizes[leaf] or (), strict=True)
        if name is not None and name not in numbers
    }
    open_ = {n: size for n, size in values.items() if n not in varying.typical}
    hints = hints_of_class(open_, _sides(varying.axes))
    hints |= {n: size for n, size in varying.typical.items() if n in values}
    for name, limits in varying.limits.items():
        if name in hints:
            hints[name] = min(max(hints[name], limits.least), limits.most)
    return replace(varying, hints=hints)


def numbers(varying: Varying, shapes: Shapes) -> frozenset[str]:
    """Return the symbols that a program does not have: they became constants in it, or are computed
    from others, such as a length plus one.
    """
    own: set[str] = set()
    others: set[str] = set()
    for name, axes in varying.axes_by_symbol().items():
        sizes = {shapes.leaves[axis.leaf][axis.number] for axis in axes}
        found = {size for size in sizes if isinstance(size, str)} - own
        own |= found
        if not found:
            others.add(name)
    return frozenset(others)


def tuned_shapes(exported: ExportedProgram, varying: Varying, sizes: TensorSizes) -> Shapes | None:
    """Return the shapes that a program serves, as far as its recording shows, with their hints.

    Parameters
    ----------
    exported
        The program, recorded for a call.
    varying, sizes
        The sizes of that call.

    Returns
    -------
    Shapes or None
        None if the program has no symbolic size.
    """
    # Imported here, since a warm process must not load SymPy.
    from tvmify.artifact.recorded_shapes import recorded_shapes

    shapes = recorded_shapes(exported, varying.hints_by_axis())
    if shapes is None:
        return None
    fixed = numbers(varying, shapes)
    if fixed.isdisjoint(varying.hints):
        return shapes
    # Classes are for the sizes that are still symbols.
    varying = tuned(varying, sizes, fixed)
    return recorded_shapes(exported, varying.hints_by_axis())


def is_tuned(shapes: Shapes, varying: Varying) -> bool:
    """Whether a program is tuned for these hints."""
    hints = varying.hints_by_axis()
    alone: dict[str, Axis] = {}
    for leaf, sizes in shapes.leaves.items():
        for number, size in enumerate(sizes):
            if isinstance(size, str):
                alone.setdefault(size, Axis(leaf, number))
    return all(
        tuned_for == min(max(hints.get(alone[symbol.name], tuned_for), symbol.lower), symbol.upper)
        for symbol, tuned_for in zip(shapes.symbols, shapes.hints, strict=True)
    )


def _sides(axes: Symbols) -> frozenset[str]:
    """Return the symbols that are height and width of images, and not lengths in a mask."""
    pairs = {leaf: n[2:] for leaf, n in axes.items() if len(n) == 4 and all(n[2:])}
    elsewhere = {name for leaf in axes.keys() - pairs.keys() for name in axes[leaf]}
    images = (pair for pair in pairs.values() if elsewhere.isdisjoint(pair))
    return frozenset(name for pair in images for name in pair if name is not None)
