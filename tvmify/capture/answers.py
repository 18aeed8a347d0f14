"""Answers code that is being recorded as eager PyTorch would.

While ``torch.export`` records, a mode intercepts every torch function, and the process counts as
compiling. Code that asks about either would take a different path than in eager.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules import activation
from torch.utils._device import DeviceContext

from tvmify.torch_compat.bystanders import is_bystander
from tvmify.torch_compat.symbols import square_root
from tvmify.torch_compat.tracing import traces_here

#: Libraries that avoid what cannot be compiled while something compiles; the result is the same.
_ADAPTING = frozenset(
    "torch torchvision transformers timm diffusers accelerate kornia tvmify".split()
)

_has_torch_function = torch.overrides.has_torch_function
_is_make_fx_tracing = activation._is_make_fx_tracing


@contextlib.contextmanager
def answering_as_eager() -> Iterator[None]:
    """Answer the code that this thread records as eager PyTorch would."""
    compiler: Any = torch.compiler
    asked = (compiler.is_compiling, compiler.is_exporting)
    own_square_root = math.sqrt
    before = [function.__code__ for function in asked]
    torch.overrides.has_torch_function = _overrides  # type: ignore[assignment]
    activation._is_make_fx_tracing = _is_traced
    math.sqrt = square_root
    # Replace the code, not the name, since other modules may have imported the functions.
    for function, code in zip(asked, (_is_compiling.__code__, _is_exporting.__code__), strict=True):
        function.__code__ = code
    try:
        yield
    finally:
        for function, code in zip(asked, before, strict=True):
            function.__code__ = code
        math.sqrt = own_square_root
        activation._is_make_fx_tracing = _is_make_fx_tracing
        torch.overrides.has_torch_function = _has_torch_function


def told(flag: bool) -> bool:
    """Return a flag of ``torch.compiler`` as the caller two frames up should see it."""
    if not flag or is_bystander():
        return False
    if not traces_here():
        return True
    module = sys._getframe(2).f_globals.get("__name__", "")
    return module.partition(".")[0] in _ADAPTING


# Both run among the globals of torch.compiler, as its own functions.


def _is_compiling() -> bool:
    from tvmify.capture.answers import told

    return told(_is_compiling_flag)  # type: ignore[name-defined]  # noqa: F821


def _is_exporting() -> bool:
    from tvmify.capture.answers import told

    return told(_is_exporting_flag)  # type: ignore[name-defined]  # noqa: F821


def _overrides(arguments: Iterable[Any]) -> bool:
    """Hide the recording mode from ``torch.overrides.has_torch_function``."""
    if not traces_here():
        return _has_torch_function(arguments)
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    if any(isinstance(mode, DeviceContext) for mode in modes):
        return True  # eager runs with it, too
    with torch._C.DisableTorchFunction():
        arguments = list(arguments)
    plain = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    return any(
        getattr(own, "__func__", own) not in (None, plain, torch._C._disabled_torch_function_impl)
        for own in (getattr(type(x), "__torch_function__", None) for x in arguments)
    )


def _is_traced() -> bool:
    return False if traces_here() else _is_make_fx_tracing()
