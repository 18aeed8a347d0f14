"""Example calls from the signatures that ``warmup`` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmify.dispatch.generality.hints import CLASSES
from tvmify.errors import WarmUpError
from tvmify.signature import Args, Kwargs, TensorSpec
from tvmify.torch_compat.declared_sizes import (
    DeclaredShape,
    DeclaredSize,
    declared_size,
    is_dim,
)


@dataclass(frozen=True)
class Example:
    """A call as a signature given to ``warmup`` describes it.

    Attributes
    ----------
    args, kwargs
        The arguments, with tensors of zeros for shapes.
    declared
        What is declared about the sizes of tensors, by index among the flattened arguments. If
        some vary, all others are static.
    dims
        The sizes that vary; sizes that share a name appear once.
    """

    args: Args
    kwargs: Kwargs
    declared: Mapping[int, DeclaredShape] = field(default_factory=dict)
    dims: tuple[DeclaredSize, ...] = ()


def example_arguments(
    signature: Any,
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sequence[int] | None = None,
    *,
    shapes: bool = True,
) -> Example:
    """Turn a signature given to ``warmup`` into example arguments.

    Parameters
    ----------
    signature
        A list or tuple with one item per positional argument, or a mapping of keyword arguments.
        An item is a shape, a `TensorSpec`, a tensor, or a value to pass unchanged; a single shape,
        spec or tensor is a call with one argument. A size may be a ``torch.export.Dim``.
    dtype, device
        Dtype and device of tensors given as bare shapes.
    sizes
        A value for each of ``Example.dims``; the smallest ones by default.
    shapes
        Whether a tuple of ints is the shape of a tensor; otherwise it is a value.

    Raises
    ------
    WarmUpError
        The signature is none of these, or a size is ``Dim.STATIC``, negative or a name.
    OptionError
        A ``Dim`` is of an unsupported kind, or no size is within its limits.
    """
    dims = _Dims(sizes)

    def is_shape(item: Any) -> bool:
        return _is_shape(item) and (shapes or any(map(is_dim, item)))

    def example(item: Any) -> Any:
        if isinstance(item, TensorSpec):
            return dims.example(item.shape, item.dtype, item.device)
        if is_shape(item):
            return dims.example(item, dtype, device)
        if isinstance(item, Mapping):
            return {name: example(value) for name, value in item.items()}
        if isinstance(item, (list, tuple)) and not hasattr(item, "_fields"):
            return type(item)(example(value) for value in item)
        return item

    if isinstance(signature, Mapping):
        return dims.call((), {str(name): example(item) for name, item in signature.items()})
    if isinstance(signature, (TensorSpec, torch.Tensor)) or is_shape(signature):
        return dims.call((example(signature),), {})
    if isinstance(signature, (list, tuple)):
        return dims.call(tuple(example(item) for item in signature), {})
    raise WarmUpError(
        f"cannot warm up for {signature!r}: give a list with a shape, a TensorSpec or a tensor for "
        "each argument, such as [(1, 3, 224, 224)], or a dict of keyword arguments"
    )


class _Dims:
    """Collects the sizes of a signature that vary."""

    def __init__(self, sizes: Sequence[int] | None) -> None:
        self._sizes = sizes
        # By name, or by number if they have none.
        self._dims: dict[str | int, DeclaredSize] = {}
        self._tensors: list[tuple[torch.Tensor, DeclaredShape]] = []

    def example(
        self, shape: Sequence[Any], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a tensor of zeros."""
        _check_sizes(shape)
        declared = tuple(map(declared_size, shape))
        if any(is_dim(size) and not dim.varies for size, dim in zip(shape, declared, strict=True)):
            raise WarmUpError(
                f"a size of {tuple(shape)} is static: give a number, or a Dim that allows sizes "
                "of 2 and more"
            )
        pairs = zip(shape, declared, strict=True)
        sizes = tuple(self._chosen(dim) if dim.varies else size for size, dim in pairs)
        tensor = TensorSpec(sizes, dtype, device).example()
        self._tensors.append((tensor, declared))
        return tensor

    def _chosen(self, dim: DeclaredSize) -> int:
        key = len(self._dims) if dim.name is None else dim.name
        self._dims[key] = dim = dim.within(self._dims.get(key, dim))
        return dim.least if self._sizes is None else self._sizes[list(self._dims).index(key)]

    def call(self, args: Args, kwargs: Kwargs) -> Example:
        """Return a call with these arguments."""
        leaves = pytree.tree_leaves((args, kwargs))
        places = {id(leaf): place for place, leaf in enumerate(leaves)}
        declared = {places[id(tensor)]: shape for tensor, shape in self._tensors}
        dims = tuple(self._dims.values())
        return Example(args, kwargs, declared if dims else {}, dims)


def example_calls(
    signature: Any, dtype: torch.dtype, device: torch.device, *, shapes: bool = True
) -> list[Example]:
    """Return calls from a signature given to ``warmup``: one for each class of sizes.

    Parameters and errors are those of `example_arguments`.
    """
    make = partial(example_arguments, signature, dtype, device, shapes=shapes)
    found = make()
    return [make(sizes) for sizes in sizes_of_classes(found.dims)] if found.dims else [found]


def sizes_of_classes(dims: Sequence[DeclaredSize]) -> list[tuple[int, ...]]:
    """Return sizes within limits: one set for each class that has sizes within them.

    Parameters
    ----------
    dims
        Sizes that may vary.

    Returns
    -------
    list of tuple of int
        Each tuple has a size for each of ``dims``.
    """
    found: list[tuple[int, ...]] = []
    least = 1
    for most, hint in CLASSES:
        # What its program is tuned for, or else the smallest.
        tried = (_at_least(product, dims) for product in (hint, least))
        sizes = next((sizes for sizes in tried if least <= prod(sizes) <= most), None)
        if sizes is not None:
            found.append(sizes)
        least = most + 1
    return found


def _is_shape(item: Any) -> bool:
    """Whether it is a shape; a name among its sizes is meant to be one, too."""
    return (
        isinstance(item, tuple)
        and any(type(size) is int or is_dim(size) for size in item)
        and all(type(size) in (int, str) or is_dim(size) for size in item)
        and not hasattr(item, "_fields")
    )


def _check_sizes(shape: Sequence[Any]) -> None:
    for size in shape:
        if isinstance(size, str) or (type(size) is int and size < 0):
            raise WarmUpError(
                f"{size!r} is not a size, in the shape {tuple(shape)}: give a number, or a "
                "torch.export.Dim where sizes vary"
            )


def _at_least(product: int, dims: Sequence[DeclaredSize]) -> tuple[int, ...]:
    """Return sizes with about this product, or a larger one if need be; grow the last first."""
    sizes = [dim.least for dim in dims]
    for place in reversed(range(len(sizes))):
        others = prod(sizes[:place]) * prod(sizes[place + 1 :])
        wanted = -(-product // others)
        sizes[place] = min(max(sizes[place], wanted), dims[place].most)
    return tuple(sizes)
