"""What the programs of each class of sizes are tuned for."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt, prod

#: The products of all symbols up to which a program of each class is used, and the product that
#: it is tuned for. Measured on matrix products of so many rows: docs/measurements/shapes.md.
CLASSES = ((16, 16), (64, 48), (256, 128), (2**62, 512))


#: Height and width that the last class is tuned for: networks halve images several times.
_SIDE = 128


def hints_of_class(
    values: Mapping[str, int], sides: frozenset[str] = frozenset()
) -> dict[str, int]:
    """Return what to tune for, for calls of one class.

    Parameters
    ----------
    values
        The sizes of one of these calls, by symbol. The last gets most of the product that the
        class is tuned for, which is the length of sequences.
    sides
        Which symbols are heights and widths of images, of which both get as much.
    """
    count = prod(values.values())
    hint = next(hint for most, hint in CLASSES if count <= most)
    names = list(values)
    if sides.intersection(names):
        side = _SIDE if hint == CLASSES[-1][1] else isqrt(hint)
        return {name: side if name in sides else 2 for name in names}
    if len(names) < 2:
        return dict.fromkeys(names, hint)
    smallest = 2 if hint <= 64 else 4
    rest = max(2, hint // smallest ** (len(names) - 1))
    return dict.fromkeys(names[:-1], smallest) | {names[-1]: rest}
