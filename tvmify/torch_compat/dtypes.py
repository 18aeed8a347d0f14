"""Names of dtypes."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without torch's prefix, which is also its name in TVM."""
    return str(dtype).removeprefix("torch.")
