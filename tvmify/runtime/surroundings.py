"""Calls that the native signature leaves alone: other containers, modes, transforms."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from tvmify.runtime.native import flatten


def unusual_signature(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[Hashable, ...] | None]:
    """Describe a call in Python where `flatten` did not, or return None for its signature."""
    if is_being_transformed():
        return (), None
    # A default device is a mode of torch functions, which `flatten` leaves alone; it is the one
    # such mode that compiled code can follow, because the key names it.
    with torch._C.DisableTorchFunction():
        leaves, structure = pytree.tree_flatten((args, kwargs))
        leaves, signature = flatten(tuple(leaves), {})
    if signature is None:
        return (), None
    return leaves, (signature, str(structure), torch.get_default_device())


def is_being_transformed() -> bool:
    """Whether a trace, an export or a function transform looks at the operators of this call."""
    modes = [
        torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())
    ]
    return (
        torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]
        or any(not isinstance(mode, DeviceContext) for mode in modes)
    )
