"""What the programs of each class of sizes are tuned for."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

#: The products of all symbols up to which a program of each class is used, and the product that
#: it is tuned for. Measured on matrix products of so many rows: docs/measurements/shapes.md.
CLASSES = ((16, 16), (64, 48), (256, 128), (2**62, 512))


def hints_of_class(values: Mapping[str, int]) -> dict[str, int]:
    """Return what to tune for, for calls of one class.

    Parameters
    ----------
    values
        The sizes of one of these calls, by symbol. The last gets most of the product that the
        class is tuned for, which is the length of sequences.
    """
    count = prod(values.values())
    hint = next(hint for most, hint in CLASSES if count <= most)
    names = list(values)
    if len(names) < 2:
        return dict.fromkeys(names, hint)
    smallest = 2 if hint <= 64 else 4
    rest = max(2, hint // smallest ** (len(names) - 1))
    return dict.fromkeys(names[:-1], smallest) | {names[-1]: rest}
