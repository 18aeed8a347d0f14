"""A module that only holds tensors, under given names."""

from __future__ import annotations

from typing import Any

import torch


class Carrier(torch.nn.Module):
    """Holds the tensors of another module under their names, for ``torch.export`` to find."""

    def carry(self, name: str, tensor: torch.Tensor, persistent: bool = True) -> None:
        """Add a parameter, or a buffer, under a dotted name.

        Parameters
        ----------
        persistent
            Whether it belongs to ``state_dict``; if not, it becomes a buffer.
        """
        *path, last = name.split(".")
        holder: torch.nn.Module = self
        for part in path:
            holder = holder._modules.setdefault(part, torch.nn.Module())  # type: ignore
        # directly, since register_buffer refuses names that the module class uses
        is_parameter = isinstance(tensor, torch.nn.Parameter) and persistent
        tensors: dict[str, Any] = holder._parameters if is_parameter else holder._buffers
        tensors[last] = tensor
        if not persistent:
            holder._non_persistent_buffers_set.add(last)

    def carried(self, name: str) -> torch.Tensor:
        """Return the tensor under a name now; ``torch.export`` replaces them."""
        *path, last = name.split(".")
        holder: Any = self
        for part in path:
            holder = holder._modules[part]
        tensor = holder._parameters.get(last)
        return holder._buffers[last] if tensor is None else tensor
