"""Where the values of a recorded program are in memory."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from tvmify.artifact.geometry import Strided
from tvmify.torch_compat.symbols import identities_of, identity_of


def storage(node: fx.Node) -> int:
    """Return what identifies the storage of a value."""
    tensor = node.meta["val"]
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def is_same(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values are the same elements of one storage, with the same shape."""
    x, y = a.meta["val"], b.meta["val"]
    return _layout(x) == _layout(y) and storage(a) == storage(b)


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    sizes = (*x.shape, *x.stride(), x.storage_offset())
    return x.dtype, x.dim(), *identities_of(sizes)


def fills_storage(x: torch.Tensor) -> bool:
    """Whether a tensor is contiguous and covers all of its storage."""
    stride: Any = 1
    for size, given in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not _is_equal(given, stride):
            return False
        stride = stride * size
    return _is_equal(stride * x.element_size(), x.untyped_storage().nbytes())


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two sizes are equal, perhaps once products of sums are written out."""
    return bool(sympy.expand(identity_of(one) - identity_of(other)) == 0)


def positions(view: Strided) -> torch.Tensor:
    """Return the offsets of the elements of a tensor in its storage."""
    places = torch.tensor(view.offset)
    for size, stride in zip(view.sizes, view.strides, strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return places.unique()


def overlap(views: list[Strided]) -> bool:
    """Whether two views of one storage have an element in common."""
    places = [positions(view) for view in views if 0 not in view.sizes]
    return sum(p.numel() for p in places) > (torch.cat(places).unique().numel() if places else 0)
