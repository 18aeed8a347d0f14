"""Keeping the annotations of FX graphs to the threads that trace.

While any thread exports, functions that dynamo leaves alone (``torch.manual_seed``, say) annotate
the nodes of a graph, in a dict that is one for all threads: with two, one of them deletes what the
other has set, and both fail with KeyError.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch._dynamo import eval_frame
from torch.fx import traceback

from tvmify.torch_compat import tracing


class _OfTracingThreads:
    """Stands for the module ``torch.fx.traceback`` where dynamo annotates."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    @staticmethod
    def annotate(annotation: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Annotate, unless the graph is that of another thread."""
        if tracing.traces_elsewhere():
            return contextlib.nullcontext()
        return traceback.annotate(annotation)


def keep_apart() -> None:
    """Let dynamo annotate the graphs of the thread that traces, and no others."""
    if getattr(eval_frame, "fx_traceback", None) is traceback:  # not in every version of torch
        eval_frame.fx_traceback = _OfTracingThreads()  # type: ignore[assignment]
