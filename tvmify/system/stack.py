"""Threads that compile need stacks that are large enough for a compiler."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

from tvmify.errors import SmallStack

#: What threads have, unless someone sets less: `threading.stack_size`, or a server's option.
_USUAL = 8 << 20
#: TVM and LLVM need up to 192 KiB for models of a dozen layers, and overflow without an error.
_LEAST = 512 << 10
_C = ctypes.CDLL(None)
#: More than ``sizeof(pthread_attr_t)``.
_ATTRIBUTES = 256


def refuse_small_stack() -> None:
    """Refuse to compile in this thread if its stack is small.

    Raises
    ------
    SmallStack
        It is.
    """
    if has_small_stack():
        raise SmallStack(
            f"this thread has a stack of {_stack_size() >> 10} KiB, too small for a compiler",
            f"Give threads at least {_LEAST >> 10} KiB (threading.stack_size), or make the first "
            "call in another thread.",
        )


def has_small_stack() -> bool:
    """Whether this thread has too small a stack for a compiler."""
    return _stack_size() < _LEAST


@contextlib.contextmanager
def large_stacks() -> Iterator[None]:
    """Give threads that start in this context stacks for a compiler."""
    before = threading.stack_size(_USUAL)
    try:
        yield
    finally:
        threading.stack_size(before)


def _stack_size() -> int:
    size = ctypes.c_size_t(_LEAST)
    if threading.get_native_id() == os.getpid():  # that of the main thread grows
        return size.value
    attributes = ctypes.create_string_buffer(_ATTRIBUTES)
    if _C.pthread_getattr_np(ctypes.c_ulong(threading.get_ident()), attributes) == 0:
        _C.pthread_attr_getstacksize(attributes, ctypes.byref(size))
        _C.pthread_attr_destroy(attributes)
    return size.value
