"""Names of dtypes, and the integers that they hold."""

from __future__ import annotations

from typing import Any

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without torch's prefix, which is also its name in TVM."""
    return str(dtype).removeprefix("torch.")


def wrapped(argument: Any, dtype: torch.dtype) -> Any:
    """Return the integer that a number outside of an integer type's range becomes."""
    is_number = type(argument) is int
    whole = is_number and not (dtype.is_floating_point or dtype.is_complex)
    return int(torch.tensor(argument).to(dtype)) if whole else argument
