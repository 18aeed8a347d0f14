"""Load TVM, ahead of its import, and import it: once, without its log lines, with our functions."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import threading
from functools import cache
from pathlib import Path

from tvmify.system.forks import at_work


@cache
def load_ahead() -> threading.Thread:
    """Load TVM's compiler in a thread of its own, while this one is busy with torch.

    Importing TVM raises and catches a hundred errors. With the first one of a process, the names of
    all functions in all libraries are read, for its trace of the C++ stack: more than half of the
    import. So one is asked for here. Neither that nor loading a library holds the interpreter's
    lock; both hold the loader's, so this gains nothing beside a thread that imports much. What
    fails here fails again, and says so, in `prepare_tvm`.
    """
    thread = threading.Thread(target=_load, name="tvmify loads TVM")
    thread.start()
    return thread


def _load() -> None:
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        return
    # In a child, the loader's lock would be held for ever.
    with at_work(), contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libtvm_compiler.so"))
        # Of libtvm_ffi, which `tvmify.runtime` has loaded for everybody to see.
        trace = ctypes.CDLL(None).TVMFFIBacktrace
        trace.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
        trace.restype = ctypes.c_void_p
        trace(None, 0, None, 0)


@cache
def prepare_tvm() -> None:
    """Import TVM; call before the first import of a module that needs it."""
    import tvm.relax.frontend.torch  # noqa: F401

    from tvmify.compiler import intrinsics
    from tvmify.compiler.cuda import intrinsics as cuda_intrinsics

    logging.getLogger("tvm").setLevel(logging.ERROR)
    intrinsics.register()
    cuda_intrinsics.register()
