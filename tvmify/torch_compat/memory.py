"""Where the elements of a tensor are. `tvmify/native/memory_ranges.h` says the same in C++."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tvmify.errors import SaveError


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements there are from the first of a tensor to behind its last one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor are where its sizes and strides say.

    They are not on the meta device, where the storage was freed or is smaller than that, and where
    the tensor only stands for others, as in a transform. Sparse and nested tensors keep theirs in
    other tensors, and are not looked at.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return True
    last = tensor.storage_offset() + extent(tensor.shape, tensor.stride())
    # The address of the storage: other ways to ask for it are errors for some without memory.
    address = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return address != 0 and tensor.untyped_storage().nbytes() >= last * tensor.element_size()


def check_saved(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that cannot be written to a file: PyTorch would read what is not there.

    Raises
    ------
    SaveError
        One of them has no memory.
    """
    for name, tensor in tensors.items():
        if not has_memory(tensor):
            raise SaveError(
                f"{name!r} has no memory, or less than its sizes say: give it its elements before "
                "it is saved, or make it a plain attribute that forward does not read"
            )
