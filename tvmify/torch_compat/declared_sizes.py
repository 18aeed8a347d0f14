"""What users declare about sizes: ``torch.export.Dim``, and marks of ``torch._dynamo``."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvmify.errors import OptionError

#: The largest size: compiled code has 32-bit indices.
LARGEST = 2**31 - 1

#: What messages list as valid.
FORMS = "Dim('name', min=…, max=…), Dim.AUTO, Dim.DYNAMIC, Dim.STATIC, an int or None"


@dataclass(frozen=True)
class DeclaredSize:
    """What is declared about one size.

    Attributes
    ----------
    varies
        Whether it may differ from call to call; otherwise programs are for one value of it. None if
        that is not declared.
    name
        Sizes of one name are equal in all calls; None for a size without a name.
    least, most
        Limits of a size that varies, both included.
    typical
        What all programs are tuned for; None if that depends on the size.
    """

    varies: bool | None
    name: str | None = None
    least: int = 2
    most: int = LARGEST
    typical: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether it has limits of its own."""
        return (self.least, self.most) != (2, LARGEST)

    def within(self, other: DeclaredSize) -> DeclaredSize:
        """Return it with the limits of another one as well.

        Raises
        ------
        OptionError
            No size is within both.
        """
        least, most = max(self.least, other.least), min(self.most, other.most)
        if least > most:
            raise OptionError(
                f"the limits of {self.name!r} contradict each other ({self.least} to {self.most}, "
                f"and {other.least} to {other.most}): give every Dim of that name the same limits"
            )
        return dataclasses.replace(self, least=least, most=most)


#: What is declared about each axis of a tensor; None for nothing.
DeclaredShape: TypeAlias = "tuple[DeclaredSize | None, ...]"

STATIC = DeclaredSize(varies=False)


def is_dim(value: Any) -> bool:
    """Whether it is a ``Dim`` of ``torch.export``, or a hint such as ``Dim.AUTO``."""
    # The module is slow to import, and loaded already if the value is from it.
    known = sys.modules.get("torch.export.dynamic_shapes")
    return known is not None and isinstance(value, (known.Dim, known._DimHint))


def declared_size(value: Any) -> DeclaredSize:
    """Read what ``dynamic_shapes`` has for one size.

    Raises
    ------
    OptionError
        It is none of `FORMS`.
    """
    if value is None or type(value) is int:
        return STATIC
    if not is_dim(value):
        raise OptionError(f"{value!r} is not a size: expected {FORMS}")
    if hasattr(value, "root"):
        raise OptionError(
            f"{value.__name__} is computed from another Dim: give Dim.AUTO instead; tvmify finds "
            "out how sizes depend on each other"
        )
    kind = getattr(value, "type", None)
    if kind is not None and kind.name == "STATIC":
        return STATIC
    name = None if kind is not None else value.__name__
    return _between(name, value.min, value.max)


def marked_sizes(tensor: Any) -> DeclaredShape:
    """Return what ``torch._dynamo.mark_dynamic`` and similar functions declare about a tensor."""
    found: list[DeclaredSize | None] = [None] * tensor.dim()
    for axis in getattr(tensor, "_dynamo_static_indices", ()):
        found[axis] = STATIC
    for kind in "weak_dynamic", "unbacked", "dynamic":
        for axis in getattr(tensor, f"_dynamo_{kind}_indices", ()):
            found[axis] = DeclaredSize(varies=True)
    for limits in getattr(tensor, "_dynamo_dynamic_range", ()):
        found[limits.dim] = _between(None, limits.min, limits.max)
    return tuple(found)


def joined(*shapes: DeclaredShape) -> DeclaredShape:
    """Return the last declaration of each axis."""
    return tuple(
        next((size for size in reversed(axis) if size is not None), None)
        for axis in zip(*shapes, strict=True)
    )


def _between(name: str | None, least: Any, most: Any) -> DeclaredSize:
    # Limits that were not given are None, or torch's infinity, which is not an int.
    least = max(least, 2) if isinstance(least, int) else 2  # 0 and 1 have programs of their own
    most = min(most, LARGEST) if isinstance(most, int) else LARGEST
    return DeclaredSize(True, name, least, most) if least <= most else STATIC
