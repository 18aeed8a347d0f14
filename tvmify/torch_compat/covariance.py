"""Covariances in code that is recorded.

PyTorch's own functions check the degrees of freedom, a number, as a tensor, whose value is unknown
while code is recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Covariances(TorchFunctionMode):
    """Replaces calls of ``torch.cov`` and ``torch.corrcoef``; use around ``torch.export``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of PyTorch, or what does the same without reading a value."""
        spelled = _SPELLED.get(func)
        result = NotImplemented if spelled is None else spelled(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


def _covariance(
    input: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> Any:
    is_plain = fweights is None and aweights is None and input.dim() <= 2
    if not is_plain or input.dtype is torch.bool or input.is_complex():
        return NotImplemented
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    degrees = rows.size(1) - correction
    if degrees <= 0:  # eager warns; with sizes that vary, this is a guard
        return NotImplemented
    centered = rows - rows.sum(1, keepdim=True) / rows.size(1)
    return (centered @ centered.t() / degrees).squeeze()


def _correlation(input: torch.Tensor) -> Any:
    covariance = _covariance(input)
    if covariance is NotImplemented:
        return NotImplemented
    if covariance.dim() == 0:
        return covariance / covariance
    deviations = covariance.diagonal().sqrt()
    return (covariance / deviations[:, None] / deviations).clamp(-1, 1)


_SPELLED = {
    function: spelled
    for name, spelled in (("cov", _covariance), ("corrcoef", _correlation))
    for packet in [getattr(torch.ops.aten, name)]
    for function in (getattr(torch, name), getattr(torch.Tensor, name), packet, packet.default)
}
