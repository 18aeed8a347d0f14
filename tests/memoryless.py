"""Tensors without memory, with less memory than their sizes need, or with hidden memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree


class Wrapper(torch.Tensor):
    """Wraps the tensor ``plain``, as quantized and distributed weights wrap theirs."""

    plain: torch.Tensor
    options: ClassVar[dict[str, Any]] = {}

    @classmethod
    def of(cls, plain: torch.Tensor) -> Wrapper:
        """Wrap a tensor."""
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, plain.shape, dtype=plain.dtype, **cls.options
        )
        made.plain = plain
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with the plain tensors."""
        if func is torch.ops.aten.detach.default:
            return cls.of(args[0].plain)
        return func(*pytree.tree_map(_plain, args), **pytree.tree_map(_plain, kwargs or {}))


class EmptyWrapper(Wrapper):
    """Its storage has no bytes, and reports that."""

    options: ClassVar[dict[str, Any]] = {"storage_size": 0}


class AskedWrapper(Wrapper):
    """Python code returns its sizes, strides, device and layout."""

    options: ClassVar[dict[str, Any]] = {
        "dispatch_sizes_strides_policy": "sizes",
        "dispatch_device": True,
        "dispatch_layout": True,
    }


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, Wrapper) else value


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage was resized to 0 bytes, as for sharded weights."""
    return shortened(tensor, 0)


def shortened(tensor: torch.Tensor, size: int = 8) -> torch.Tensor:
    """Return a tensor whose storage was resized to `size` bytes."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(size)
    return tensor


def freed_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with an offset into a freed storage."""
    base = torch.empty(tensor.numel() + 5)
    view = base[5:].view(tensor.shape)
    base.untyped_storage().resize_(0)
    return view


def fake(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without elements that claims to be on the CPU."""
    with FakeTensorMode():
        return torch.empty(tensor.shape)


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "wrapper": Wrapper.of,
    "empty wrapper": EmptyWrapper.of,
    "asked wrapper": AskedWrapper.of,
    "freed": freed,
    "freed view": freed_view,
    "shortened": shortened,
    "fake": fake,
    "functional": lambda tensor: torch._to_functional_tensor(tensor.clone()),
    "zero": lambda tensor: torch._efficientzerotensor(tensor.shape),
    "meta": lambda tensor: tensor.to("meta"),
}
#: Those whose elements eager PyTorch can compute with.
WITH_VALUES = ("wrapper", "empty wrapper", "asked wrapper", "functional", "zero")
