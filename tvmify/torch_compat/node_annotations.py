"""Restrict annotations of FX graph nodes to the thread that traces.

While any thread exports, functions that dynamo does not trace (``torch.manual_seed``, for example)
annotate graph nodes through one dict for all threads. With two threads, one deletes what the other
has set, and both fail with KeyError.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch._dynamo import eval_frame
from torch.fx import traceback

from tvmify.torch_compat import tracing


class _OfTracingThreads:
    """Replaces the module ``torch.fx.traceback`` where dynamo annotates."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    @staticmethod
    def annotate(annotation: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Annotate, unless the graph belongs to another thread."""
        if tracing.traces_elsewhere():
            return contextlib.nullcontext()
        return traceback.annotate(annotation)


def keep_apart() -> None:
    """Let dynamo annotate only graphs of the thread that traces."""
    if getattr(eval_frame, "fx_traceback", None) is traceback:  # not in every version of torch
        eval_frame.fx_traceback = _OfTracingThreads()  # type: ignore[assignment]
