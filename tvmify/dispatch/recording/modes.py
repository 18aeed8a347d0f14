"""Torch's modes that affect which program a call needs, as JSON values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tvmify.dispatch.recording.trees import dtype_of
from tvmify.runtime import casting, casts_now
from tvmify.torch_compat.dtypes import dtype_name


def modes_now() -> dict[str, Any]:
    """Return torch's modes that affect which program a call needs."""
    grad = "inference" if torch.is_inference_mode_enabled() else "no_grad"
    return {
        "grad": "grad" if torch.is_grad_enabled() else grad,
        "autocast": {device: dtype_name(dtype) for device, dtype in casts_now().items()},
        "default_dtype": dtype_name(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


@contextlib.contextmanager
def entered(modes: Mapping[str, Any]) -> Iterator[None]:
    """Set modes that `modes_now` returned; missing ones stay unchanged."""
    before = modes_now()
    with contextlib.ExitStack() as stack:
        stack.callback(_set_global_modes, before)
        _set_global_modes(before | dict(modes))
        grad = modes.get("grad", before["grad"])
        stack.enter_context(torch.inference_mode(grad == "inference"))
        stack.enter_context(torch.set_grad_enabled(grad == "grad"))
        casts = modes.get("autocast", before["autocast"]).items()
        stack.enter_context(casting({device: dtype_of(name) for device, name in casts}))
        if (default := modes.get("default_device", "cpu")) != before["default_device"]:
            stack.enter_context(torch.device(default))
        yield


def _set_global_modes(modes: Mapping[str, Any]) -> None:
    torch.set_default_dtype(dtype_of(modes["default_dtype"]))
    torch.use_deterministic_algorithms(bool(modes["deterministic"]))
    torch.set_float32_matmul_precision(modes["matmul_precision"])
    torch.set_num_threads(int(modes["threads"]))
