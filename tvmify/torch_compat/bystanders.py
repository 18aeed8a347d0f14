"""Keeps what torch patches while one thread exports from all other threads.

``torch.fx`` replaces ``nn.Module.__call__`` and ``__getattr__``, which then fail for modules that
are not traced. ``torch.export`` replaces ``max``, ``min`` and ``math.pow``, whose results differ;
what is exported gets these for symbolic sizes only.
Both set flags that code asks for, to take another path. Imported only when something has to be
exported: it imports ``torch.export``.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.export import _trace
from torch.fx import _symbolic_trace

from tvmify.torch_compat.tracers import tracer_of

#: Builtin functions that ``torch.export`` replaces.
_BUILTINS = ((builtins, "max"), (builtins, "min"), (math, "pow"))
#: The thread that exports for us.
_exporting: int | None = None


def is_bystander() -> bool:
    """Whether another thread exports for us, and this one traces nothing."""
    if _exporting in (None, threading.get_ident()):
        return False
    return tracer_of(sys._getframe()) is None


@contextlib.contextmanager
def unseen_by_others() -> Iterator[None]:
    """Let other threads run eager PyTorch as usual while this one exports; use inside `tracing`."""
    global _exporting  # noqa: PLW0603
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(_symbolic_trace._Patcher, "patch_method", _patch_method))
        stack.enter_context(_replaced(_trace, "_override_builtin_ops", _override_builtins))
        for function, answer in _ASKED:
            # The code, not the name, since other modules may have imported the function.
            stack.enter_context(_replaced(function, "__code__", answer.__code__))
        before, _exporting = _exporting, threading.get_ident()
        try:
            yield
        finally:
            _exporting = before


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def _for_this_thread(here: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `here` in this thread and `elsewhere` in all others."""
    thread = threading.get_ident()

    @functools.wraps(here)
    def function(*args: Any, **kwargs: Any) -> Any:
        chosen = here if threading.get_ident() == thread else elsewhere
        return chosen(*args, **kwargs)

    return function


_own_patch_method = _symbolic_trace._Patcher.patch_method
_own_override_builtins = _trace._override_builtin_ops


def _patch_method(
    patcher: Any, cls: type, name: str, function: Callable[..., Any], deduplicate: bool = True
) -> None:
    """Replace a method of a class, for this thread."""
    function = _for_this_thread(function, getattr(cls, name))
    _own_patch_method(patcher, cls, name, function, deduplicate)


@contextlib.contextmanager
def _override_builtins() -> Iterator[None]:
    """Replace builtin functions, for this thread and symbolic sizes."""
    before = [getattr(owner, name) for owner, name in _BUILTINS]
    with _own_override_builtins():
        for (owner, name), own in zip(_BUILTINS, before, strict=True):
            setattr(owner, name, _for_this_thread(_for_sizes(getattr(owner, name), own), own))
        yield


def _for_sizes(replacement: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is another one for symbolic sizes.

    ``max`` of two tensors is one of them, or an error; torch's is ``maximum``, whose NaNs differ.
    """

    def function(*args: Any, **kwargs: Any) -> Any:
        held = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        symbolic = any(isinstance(value, (torch.SymInt, torch.SymFloat)) for value in held)
        return (replacement if symbolic else own)(*args, **kwargs)

    return function


# These run among the globals of torch's own functions.


def _is_compiling() -> bool:
    from tvmify.torch_compat.bystanders import is_bystander

    return _is_compiling_flag and not is_bystander()  # type: ignore[name-defined]  # noqa: F821


def _is_exporting() -> bool:
    from tvmify.torch_compat.bystanders import is_bystander

    return _is_exporting_flag and not is_bystander()  # type: ignore[name-defined]  # noqa: F821


def _is_fx_tracing() -> bool:
    from tvmify.torch_compat.bystanders import is_bystander

    return _is_fx_tracing_flag and not is_bystander()  # type: ignore[name-defined]  # noqa: F821


def _is_fx_symbolic_tracing() -> bool:
    return is_fx_tracing() and not torch.compiler.is_compiling()  # type: ignore[name-defined]  # noqa: F821


_ASKED: tuple[tuple[Any, Any], ...] = (
    (torch.compiler.is_compiling, _is_compiling),
    (torch.compiler.is_exporting, _is_exporting),
)
if hasattr(_symbolic_trace, "_is_fx_tracing_flag"):  # since PyTorch 2.14, each thread has its own
    _ASKED += (
        (_symbolic_trace.is_fx_tracing, _is_fx_tracing),
        (_symbolic_trace.is_fx_symbolic_tracing, _is_fx_symbolic_tracing),
    )
