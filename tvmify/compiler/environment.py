"""Loads and imports TVM: once, without its log output, and with our functions registered."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tvmify.errors import BuildError
from tvmify.system.forks import at_work
from tvmify.system.stack import large_stacks


@cache
def load_ahead() -> threading.Thread:
    """Load TVM's compiler in another thread, while this one is busy with torch. Importing TVM
    raises and catches a hundred errors. The first error of a process reads the symbols of all
    libraries for its C++ stack trace, which takes more than half of the import; so the trace is
    requested here. Neither that nor loading a library holds the GIL; both hold the loader's lock,
    so this gains nothing beside a thread that imports much. A failure here is repeated, and
    reported, by `prepare_tvm`.
    """
    thread = threading.Thread(target=_load, name="tvmify loads TVM")
    with large_stacks():
        thread.start()
    return thread


def _load() -> None:
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        return
    # In a forked child, the loader's lock would be held forever.
    with at_work(), contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(str(_compiler_of(spec.origin)))
        # From libtvm_ffi, whose symbols `tvmify.runtime` has loaded globally.
        trace = ctypes.CDLL(None).TVMFFIBacktrace
        trace.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
        trace.restype = ctypes.c_void_p
        trace(None, 0, None, 0)


@cache
def prepare_tvm() -> None:
    """Import TVM; call before the first import of a module that needs it.

    Raises
    ------
    BuildError
        It was imported without its compiler.
    """
    with _home():
        _check_compiler()
        import tvm.relax.frontend.torch  # noqa: F401

    from tvmify.compiler import intrinsics
    from tvmify.compiler.cuda import intrinsics as cuda_intrinsics

    logging.getLogger("tvm").setLevel(logging.ERROR)
    intrinsics.register()
    cuda_intrinsics.register()


@contextlib.contextmanager
def _home() -> Iterator[None]:
    """Spare TVM's import, which looks for the user's cache directory, the error of having none."""
    try:
        Path.home()
    except RuntimeError:
        pass
    else:
        yield
        return
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = before or "."  # which other libraries ignore: it is relative
    try:
        yield
    finally:
        del os.environ["XDG_CACHE_HOME"]
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def _check_compiler() -> None:
    from tvm import base

    if not base._RUNTIME_ONLY:
        return
    # If it cannot load the compiler, TVM goes on without it, and does not say why.
    why = "TVM_USE_RUNTIME_LIB is 1"
    if os.environ.get("TVM_USE_RUNTIME_LIB") != "1":
        try:
            ctypes.CDLL(str(_compiler_of(base.__file__)))
            why = "it could not be loaded then"
        except OSError as error:
            why = str(error)
    raise BuildError(
        f"TVM was imported without its compiler: {why}",
        "Fix that, and start this process again; `tvmify doctor` checks the installation.",
    )


def _compiler_of(module: str) -> Path:
    """Return the path of TVM's compiler, given that of a module at the top of its package."""
    return Path(module).parent / "lib" / "libtvm_compiler.so"
