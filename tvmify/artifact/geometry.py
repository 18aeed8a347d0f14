"""Where a view lies in the tensor that it is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmify.artifact.expressions import Size, check_size, expect, symbols_of, value_of

if TYPE_CHECKING:
    import torch

#: Limit of leaves, tensors and elements, so that native code can count with 64 bits.
_TOO_MANY = 1 << 62


#: The most axes that PyTorch's views have.
MOST_AXES = 64


def base_stride(axis: int) -> str:
    """Return the symbol for a stride of the tensor that a view is of."""
    return f"t{axis}"


_STRIDES = frozenset(map(base_stride, range(MOST_AXES)))


class Strided(NamedTuple):
    """A `Geometry` without symbols."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Geometry:
    """Sizes, strides and offset of a view, in elements from the first one of its base.

    Each is a number, or a size over the symbols of ``Artifact.shapes``. Strides and offset of a
    view of a tensor with any strides are sizes over these, too: `base_stride`.
    """

    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size

    def __post_init__(self) -> None:
        for value in (*self.sizes, *self.strides, self.offset):
            check_size(value)
        # The offset is relative to that of the base, so it may be negative.
        offset = abs(self.offset) if isinstance(self.offset, int) else 0
        check_indices(*(n for n in (*self.sizes, *self.strides) if isinstance(n, int)), offset)
        expect(len(self.sizes) == len(self.strides), "a view needs a stride for each size")

    def symbols(self) -> set[str]:
        """Return the names of its symbols, apart from those for strides of its base."""
        names = set().union(*map(symbols_of, (*self.sizes, *self.strides, self.offset)))
        return names - _STRIDES

    def of(self, base: torch.Tensor, values: Mapping[str, int] | None = None) -> torch.Tensor:
        """Return the view of a tensor, for values of the symbols; the two share memory."""
        strides = {base_stride(axis): stride for axis, stride in enumerate(base.stride())}
        sizes, strides, offset = self.at({**(values or {}), **strides})
        return base.as_strided(sizes, strides, base.storage_offset() + offset)

    def at(self, values: Mapping[str, int]) -> Strided:
        """Return it with numbers in place of the symbols."""
        return Strided(
            tuple(value_of(size, values) for size in self.sizes),
            tuple(value_of(stride, values) for stride in self.strides),
            value_of(self.offset, values),
        )


def check_indices(*values: Any) -> None:
    """Refuse values that are not valid indices or sizes, including bools, which are ints.

    Raises
    ------
    ValueError
        One of them is not valid.
    """
    for value in values:
        expect(type(value) is int and 0 <= value < _TOO_MANY, f"{value!r:.50} is not an index")
