"""How recorded tensors lie in memory."""

from __future__ import annotations

import torch

from tvmify.torch_compat.symbols import hint_of


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the axes of a tensor, from the outermost in memory to the innermost.

    None if that is their own order, or if elements share memory. PyTorch gives the result of an
    operator on each element, and random numbers that it draws for each, the same order.
    """
    sizes, strides = (list(map(hint_of, of)) for of in (tensor.shape, tensor.stride()))
    axes = [axis for axis, size in enumerate(sizes) if size != 1]
    if not all(strides[axis] for axis in axes):
        return None
    order = sorted(axes, key=strides.__getitem__, reverse=True)
    return None if order == axes else [i for i, size in enumerate(sizes) if size == 1] + order


def inverse(order: list[int]) -> list[int]:
    """Return the order that undoes a permutation of axes."""
    return sorted(range(len(order)), key=order.__getitem__)
