"""What ``torch.jit.script`` leaves behind: cycles of references that hold the module's tensors.

What looks names up for the length of a container keeps the frame that made the container, and a
module keeps its ignored methods, which are bound to it. Until the garbage collector comes by, the
weights of a deleted model would stay in memory, and ``torch.utils.swap_tensors`` would refuse them.
"""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import _jit_internal


@contextlib.contextmanager
def noting(made: list[torch.nn.Module]) -> Iterator[None]:
    """Add to a list every module that ``torch.jit.script`` makes in this thread.

    No frame is kept: its variables are C++ modules, too, which cannot be emptied.
    """
    thread = threading.get_ident()
    class_: Any = torch.jit.RecursiveScriptModule
    construct, names_in_frame = class_._construct, _jit_internal.createResolutionCallbackFromFrame

    def constructed(cpp_module: Any, fill: Any) -> torch.jit.RecursiveScriptModule:
        module: torch.jit.RecursiveScriptModule = construct(cpp_module, fill)
        if threading.get_ident() == thread:
            made.append(module)
        return module

    def names(frames_up: int = 0) -> Callable[[str], Any]:
        if threading.get_ident() != thread:
            return names_in_frame(frames_up + 1)
        return vars(builtins).get  # all that the source of a container's length could name

    class_._construct = staticmethod(constructed)
    _jit_internal.createResolutionCallbackFromFrame = names
    try:
        yield
    finally:
        class_._construct = staticmethod(construct)
        _jit_internal.createResolutionCallbackFromFrame = names_in_frame


def empty(modules: Iterable[torch.nn.Module]) -> None:
    """Empty modules that are no longer used, although something still refers to them."""
    for module in modules:
        vars(module).clear()
