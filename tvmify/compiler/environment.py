"""Import TVM, once, without its log lines, and with our vectorised functions registered."""

from __future__ import annotations

import logging
from functools import cache


@cache
def prepare_tvm() -> None:
    """Import TVM; call before the first import of a module that needs it."""
    import tvm.relax.frontend.torch  # noqa: F401

    from tvmify.compiler import intrinsics
    from tvmify.compiler.cuda import intrinsics as cuda_intrinsics

    logging.getLogger("tvm").setLevel(logging.ERROR)
    intrinsics.register()
    cuda_intrinsics.register()
