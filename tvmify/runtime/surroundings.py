"""The context of a call: modes, transforms, and containers that native code does not handle."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from tvmify.errors import GradientsNeeded, TrainingMode
from tvmify.runtime.native import flatten
from tvmify.runtime.watched import Watched
from tvmify.torch_compat.dtypes import dtype_name
from tvmify.torch_compat.tracing import settle

_DEVICES = ("cpu", "cuda")


def unusual_signature(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[Hashable, ...] | None]:
    """Describe in Python a call that `flatten` could not; None as signature if nothing can."""
    if is_being_transformed():
        return (), None
    # A default device is a torch function mode, which `flatten` does not handle. Compiled code
    # supports this one such mode, because it is part of the key.
    with torch._C.DisableTorchFunction():
        leaves, structure = pytree.tree_flatten((args, kwargs))
        leaves, signature = flatten(tuple(leaves), {})
    if signature is None:
        return (), None
    return leaves, (signature, str(structure), torch.get_default_device())


def is_being_transformed() -> bool:
    """Whether a trace, an export or a function transform intercepts this call's operators."""
    modes = [
        torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())
    ]
    return (
        torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]
        or any(not isinstance(mode, DeviceContext) for mode in modes)
    )


def is_traced_here() -> bool:
    """Whether this call is traced; ``torch.compiler.is_compiling()`` is true for all threads."""
    if is_dynamo_compiling() or is_being_transformed():
        return True
    settle()
    return False


def autocast_text() -> str:
    """Return the autocast state as text; empty if it is off."""
    casts = casts_now().items()
    return ", ".join(f"autocast {device} {dtype_name(dtype)}" for device, dtype in casts)


def casts_now() -> dict[str, torch.dtype]:
    """Return autocast's dtype for each device type for which it is on."""
    return {
        device: torch.get_autocast_dtype(device)
        for device in _DEVICES
        if torch.is_autocast_enabled(device)
    }


@contextlib.contextmanager
def casting(casts: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Turn autocast on for these device types, and off for others."""
    with contextlib.ExitStack() as stack:
        for device in _DEVICES:
            stack.enter_context(torch.autocast(device, casts.get(device), device in casts))
        yield


def gradients_text(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the gradient state that code can query: modes, and a letter for each tensor."""
    letters = "".join(
        "gG"[leaf.requires_grad] + "iI"[leaf.is_inference()]
        for leaf in pytree.tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor)
    )
    return f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()} {letters}"


def check_modes(watched: Watched, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Refuse modes that compiled code does not support; return whether gradients are possible.

    Raises
    ------
    TrainingMode, GradientsNeeded, NotCompiled
        The module is in training mode, an input requires a gradient, or there is a hook,
        or an attribute in ``__slots__``.
    """
    if watched.training is not None:
        where = f"submodule {watched.training!r}" if watched.training else "the module"
        raise TrainingMode(f"{where} is in training mode", "Call .eval() before inference.")
    watched.check_shapes()
    watched.check_slots()
    watched.check_hooks()
    if not torch.is_grad_enabled():
        return False
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise GradientsNeeded(
                "an input requires a gradient",
                "Call under torch.no_grad() or torch.inference_mode(), or detach the input.",
            )
    return watched.requires_grad
