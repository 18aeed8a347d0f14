"""Errors of modules that code catches while it is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.fx import Tracer


@contextlib.contextmanager
def caught_errors() -> Iterator[None]:
    """Let code that is recorded call a module, and catch its error: some ask in this way whether it
    takes an argument. Otherwise torch's record of which modules are running keeps the failed one,
    and recording fails at the end of the module around; use inside `tracing`.
    """
    tracer: Any = Tracer
    call = tracer.call_module

    def call_module(self: Any, *args: Any) -> Any:
        before = dict(self.module_stack)
        try:
            return call(self, *args)
        except BaseException:
            self.module_stack.clear()
            self.module_stack.update(before)
            raise

    tracer.call_module = call_module
    try:
        yield
    finally:
        tracer.call_module = call
