"""Import TVM, once, without its noise, and with our vectorised functions registered."""

from __future__ import annotations

import logging
import warnings
from functools import cache


@cache
def prepare_tvm() -> None:
    """Import TVM; call before the first import of a module that needs it."""
    # A deprecation inside TVM is no news to the user, and must not fail under ``-W error``.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tvm.relax.frontend.torch  # noqa: F401

        from tvmify.compiler import intrinsics
    logging.getLogger("tvm").setLevel(logging.ERROR)
    intrinsics.register()
