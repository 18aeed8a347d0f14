"""Repeats a call in eager PyTorch for its backward, with the module as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tvmify.capture import resolve
from tvmify.capture.twin import twin
from tvmify.runtime import Watched


def replay(
    call: Callable[[Any], Any],
    module: nn.Module,
    watched: Watched,
    tensors: Mapping[str, torch.Tensor],
) -> Any:
    """Return the result of an earlier call in eager PyTorch.

    The module may have changed since: ``torch.func.functional_call`` swaps its weights during a
    call, and a training loop may call ``train()`` before ``backward()``.

    Parameters
    ----------
    call
        Computes it, given the module.
    watched
        The module at the time of the call.
    tensors
        The tensors of the module that the call read, by name.
    """
    weights = {
        name: tensor for name, tensor in tensors.items() if _present(module, name) is not tensor
    }
    modes = {
        path: mode
        for path, mode in watched.modes().items()
        if getattr(_present(module, path), "training", mode) != mode
    }
    if not weights and not modes:
        return call(module)
    then = twin(module)
    owned = {id(part) for part in then.modules()}
    for name, tensor in weights.items():
        path, _, last = name.rpartition(".")
        owner = _present(then, path)
        if id(owner) not in owned or isinstance(owner, torch.jit.ScriptModule):
            raise RuntimeError(
                f"the weight {name!r} was replaced between forward and backward, and tvmify "
                "cannot restore it: call backward() before you replace it"
            )
        holders = (owner.__dict__, owner._parameters, owner._buffers)
        holder = next((h for h in holders if last in h), owner.__dict__)
        holder[last] = tensor
    for path, mode in modes.items():
        if id(part := _present(then, path)) in owned:
            part.training = mode
    return call(then)


def _present(root: Any, name: str) -> Any:
    if not name:
        return root
    try:
        return resolve(root, name)
    except (AttributeError, LookupError, ValueError):
        return None
