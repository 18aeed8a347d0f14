"""Which graphs belong to what ``torch.compile`` returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list, innermost_fn

from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.integrations.calls import GRAPHS


def dispatchers_of_compiled(subject: Any) -> list[Dispatcher] | None:
    """Return the dispatchers of the graphs of a module or function under ``torch.compile``.

    These are the graphs of the function, or of the forward of the module and of its submodules, and
    of what follows their graph breaks; not those of functions that are called in between.

    Parameters
    ----------
    subject
        What ``torch.compile`` returned, or a module whose ``compile()`` was called; for anything
        else the result is None.
    """
    weights = None
    if isinstance(subject, nn.Module):
        if getattr(subject, "_compiled_call_impl", None) is None and not hasattr(
            subject, "_orig_mod"
        ):
            return None
        weights = {id(tensor) for tensor in (*subject.parameters(), *subject.buffers())}
        functions = [subject.forward, *(type(part).forward for part in subject.modules())]
    elif hasattr(subject, "_torchdynamo_orig_callable"):
        functions = [subject]
    else:
        return None
    called = _called_from(functions)
    found = [graph for graph in list(GRAPHS) if graph.origin.backend_id in called]
    found.sort(key=lambda graph: graph.origin.label)
    return [dispatcher for graph in found for dispatcher in graph.dispatchers_for(weights)]


def _called_from(functions: Iterable[Callable[..., Any]]) -> set[str]:
    """Return the names that the code which Dynamo made of some functions refers to."""
    todo, seen = list(functions), set()
    names: set[str] = set()
    while todo:
        function = innermost_fn(todo.pop())
        function = getattr(function, "__func__", function)  # of a bound method
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        for entry in _debug_get_cache_entry_list(code):
            names.update(entry.code.co_names)
            # The code after a graph break is a separate function.
            todo += [
                function.__globals__[name]
                for name in entry.code.co_names
                if name.startswith("__resume_at") and name in function.__globals__
            ]
    return names
