"""Shapes of operators that some versions of PyTorch cannot record, or record for too few sizes."""

from __future__ import annotations

import operator
import threading
from typing import Any

import torch
import torch._meta_registrations

_ENCODER_LAYER = "aten::_transformer_encoder_layer_fwd"


def complete() -> None:
    """Do what later versions than PyTorch 2.11 do.

    It lacks the fast path of ``nn.TransformerEncoderLayer``, and its pools check whether sizes are
    even, although Python's division needs no correction for that.
    """
    torch._meta_registrations.div_rtn = operator.floordiv
    if torch.version.cuda is not None:
        _set_guard()
    if not torch._C._dispatch_has_kernel_for_dispatch_key(_ENCODER_LAYER, "Meta"):
        torch.library.register_fake(_ENCODER_LAYER, _same_shape)


def _set_guard() -> None:
    """Set PyTorch's guard of CUDA devices in a thread that never ends.

    Without a GPU, PyTorch 2.11 uses one that belongs to the first thread with fake tensors. Later
    ones crash if that thread has ended.
    """
    set_guard = torch._C._ensureCUDADeviceGuardSet
    if threading.current_thread() is threading.main_thread():
        set_guard()
        return
    is_set = threading.Event()

    def stay() -> None:
        set_guard()
        is_set.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="tvmify keeps a guard", daemon=True).start()
    is_set.wait()


def _same_shape(src: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(src)
