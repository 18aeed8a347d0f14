"""A module that only carries tensors, under names of somebody else's choice."""

from __future__ import annotations

from typing import Any

import torch


class Carrier(torch.nn.Module):
    """Carries the tensors of a module under their own names, for ``torch.export`` to find them."""

    def carry(self, name: str, tensor: torch.Tensor, persistent: bool = True) -> None:
        """Add a parameter, or a buffer, under a dotted name.

        Parameters
        ----------
        persistent
            Whether it belongs to ``state_dict``; what does not is a buffer.
        """
        *path, last = name.split(".")
        holder: torch.nn.Module = self
        for part in path:
            holder = holder._modules.setdefault(part, torch.nn.Module())  # type: ignore
        # directly, for register_buffer refuses names that a module class uses itself
        is_parameter = isinstance(tensor, torch.nn.Parameter) and persistent
        tensors: dict[str, Any] = holder._parameters if is_parameter else holder._buffers
        tensors[last] = tensor
        if not persistent:
            holder._non_persistent_buffers_set.add(last)

    def carried(self, name: str) -> torch.Tensor:
        """Return what is carried under a name now: ``torch.export`` puts others in its place."""
        *path, last = name.split(".")
        holder: Any = self
        for part in path:
            holder = holder._modules[part]
        tensor = holder._parameters.get(last)
        return holder._buffers[last] if tensor is None else tensor
