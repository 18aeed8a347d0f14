"""Which threads are inside an API of torch that traces."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import torch

from tvmify.system.garbage import uncollected

_TORCH = Path(torch.__file__).parent
#: Functions that run only while torch traces: file and names, and the public name of the API.
_TRACERS = {
    (str(_TORCH / file), function): name
    for file, functions, name in (
        ("export/_trace.py", "_export _export_for_training", "torch.export"),
        ("export/exported_program.py", "_decompose_exported_program", "run_decompositions"),
        ("_dynamo/convert_frame.py", "_compile _fullgraph_capture_frame", "torch.compile"),
        ("fx/experimental/proxy_tensor.py", "dispatch_trace", "make_fx"),
        ("fx/_symbolic_trace.py", "trace", "torch.fx.symbolic_trace"),
    )
    for function in functions.split()
}


def tracer_of(frame: FrameType | None) -> str | None:
    """Return the name of the outermost tracing API that calls a frame, or None."""
    found = None
    while frame is not None:
        code = frame.f_code
        found = _TRACERS.get((code.co_filename, code.co_name), found)
        frame = frame.f_back
    return found


def tracer_of_other_threads() -> str | None:
    """Return the name of an API that traces in another thread than this one, or None."""
    here = threading.get_ident()
    # Python 3.11 makes an object of a running thread's frame when it is asked for. Were that to
    # start a collection, a finalizer could let the thread return and free the frame.
    with uncollected():
        frames = (top for thread, top in sys._current_frames().items() if thread != here)
        return next(filter(None, map(tracer_of, frames)), None)
