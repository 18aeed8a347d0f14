"""``torch.compile(model, backend="tvmify")``: the backend that PyTorch finds by its entry point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import ShortenTraceback

from tvmify.decorate.decorated import FINDERS
from tvmify.errors import OptionError
from tvmify.integrations.compiled import dispatchers_of_compiled
from tvmify.integrations.control_flow import (
    assigns_data,
    calls_of,
    in_pieces,
    is_not_for_autograd,
)
from tvmify.integrations.dynamo_graph import Origin
from tvmify.integrations.flexible_attention import inline_flex_attention
from tvmify.options import CompileOptions

#: Options of the decorator that mean nothing here, and what to do instead.
_ELSEWHERE = {
    "dynamic": "give it to torch.compile itself, as torch.compile(model, dynamic=True)",
    "record": "warm up the calls themselves: there is no module to warm up from a file",
}


class BackendOptionError(OptionError, ShortenTraceback):
    """An option of the backend is not valid; the message lists the valid ones.

    Dynamo does not change such an error.
    """

    def __init__(self, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)


def backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a graph of Dynamo: what ``torch.compile(model, backend="tvmify")`` calls.

    Parameters
    ----------
    module
        The graph.
    example_inputs
        Its arguments: parameters, tensors, sizes.
    mode, options
        Of ``torch.compile``. Options are fields of `CompileOptions`, but ``dynamic`` and
        ``record``.

    Returns
    -------
    Any
        Takes such arguments, and returns the results. The first call compiles.

    Raises
    ------
    BackendOptionError
        A mode, the name or the value of an option is not valid; the message lists the valid ones.

    Examples
    --------
    >>> net = torch.compile(model, backend="tvmify", options={"strict": True})
    """
    chosen, origin = compile_options(mode, options), Origin.of(module, example_inputs)
    has_gradients = torch.is_grad_enabled() or _turns_gradients_on(module)
    needs_gradients = has_gradients and any(map(_requires_grad, example_inputs))
    module, has_flex_attention = inline_flex_attention(module)
    has_transforms = _has_transforms(module)
    if needs_gradients or has_flex_attention or has_transforms:
        from tvmify.integrations.training import with_autograd

        # transforms must not be cut into pieces
        is_apart = assigns_data if has_transforms else is_not_for_autograd
        if any(map(is_apart, module.graph.nodes)):
            compiled = partial(with_autograd, options=chosen)
            return in_pieces(module, example_inputs, origin, compiled, is_apart)
        return with_autograd(module, example_inputs, origin, chosen)
    return calls_of(module, example_inputs, origin, chosen, weights_are_state=True)


def compile_options(mode: str | None, options: Mapping[str, Any] | None) -> CompileOptions:
    """Return the options that a mode and options of ``torch.compile`` mean.

    Raises
    ------
    BackendOptionError
        As `backend` says.
    """
    if not isinstance(options, Mapping | None):
        raise BackendOptionError(f"options is {options!r}: expected a dict of options")
    given = {**(options or {}), "mode": mode}
    try:
        return CompileOptions.of(given, without=_ELSEWHERE)
    except OptionError as error:
        hints = [f"; for {name!r}, {hint}" for name, hint in _ELSEWHERE.items() if name in given]
        raise BackendOptionError(str(error) + "".join(hints)) from None


def _has_transforms(module: fx.GraphModule) -> bool:
    """Whether a graph enters transforms of ``torch.func``, which only AOTAutograd resolves."""
    modules = (getattr(node.target, "__module__", None) for node in module.graph.nodes)
    return any("_functorch" in (name or "") for name in modules)


def _turns_gradients_on(module: fx.GraphModule) -> bool:
    """Whether a graph enters grad mode, as ``with torch.enable_grad()`` does."""
    nodes = module.graph.nodes
    return any(node.target is torch._C._set_grad_enabled and node.args[0] for node in nodes)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


FINDERS.append(dispatchers_of_compiled)
