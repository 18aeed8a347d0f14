"""Which memory a tensor occupies; `tvmify/native/memory_ranges.h` is the same in C++."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tvmify.errors import SaveError


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the extent of a tensor in memory: the elements from its first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor are in memory where its sizes and strides say.

    They are not if it is on the meta device, if its storage was freed or is too small, or if it
    only wraps others, as in a functorch transform. Sparse and nested tensors keep their elements in
    other tensors, and are not checked.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return True
    last = tensor.storage_offset() + extent(tensor.shape, tensor.stride())
    # Other ways to get the address raise for some tensors without memory.
    address = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return address != 0 and tensor.untyped_storage().nbytes() >= last * tensor.element_size()


def check_saved(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors without memory, of which PyTorch would write invalid memory to a file.

    Raises
    ------
    SaveError
        One of them has no memory.
    """
    for name, tensor in tensors.items():
        if not has_memory(tensor):
            raise SaveError(
                f"{name!r} has no storage, or less than its shape needs: allocate and fill it "
                "before saving, or make it a plain attribute that forward does not read"
            )
