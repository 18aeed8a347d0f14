"""Operators on tensors without elements; eager PyTorch refuses some of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from tvm.ir import Expr

from tvmify.compiler.aten import operators
from tvmify.compiler.messages import first_line
from tvmify.compiler.sizes import hint, hints
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.silence import silenced


def refuse_what_raises(node: fx.Node, sizes: Callable[[torch.Tensor], tuple[Any, ...]]) -> None:
    """Try a call that reads a tensor without elements, which computes next to nothing. A recorded
    program may have results of such calls where eager raises an error: shapes alone do not tell.

    Parameters
    ----------
    sizes
        Returns the shape of a value in the terms of the compiler, as the arguments of the node are.

    Raises
    ------
    UnsupportedOperator
        The call raises. In eager PyTorch the whole program raises the same.
    """
    target = node.target
    if (
        not isinstance(target, torch._ops.OpOverload)
        or target._schema.is_mutable
        or operators.is_random(node)
        or not any(_is_empty(argument) for argument in node.all_input_nodes)
    ):
        return
    example = partial(_example, sizes)
    args, kwargs = pytree.tree_map(example, (list(node.args), dict(node.kwargs)))
    try:
        with torch.no_grad(), silenced():  # the user's own call warns
            target(*args, **kwargs)
    except Exception as error:
        raise UnsupportedOperator([operators.name(node)], first_line(error)) from error


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no elements in any call. A symbol is never 0."""
    return any(not isinstance(size, torch.SymInt) and size == 0 for size in tensor.shape)


def _is_empty(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and is_empty(value)


def _example(sizes: Callable[[torch.Tensor], tuple[Any, ...]], argument: Any) -> Any:
    """Return zeros of the same shape; numbers for symbolic sizes.

    They are not one element expanded: kernels of PyTorch read some arguments as contiguous.
    """
    if isinstance(argument, Expr):
        return hint(argument)
    if not isinstance(argument, fx.Node):
        return argument
    value = argument.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros(hints(sizes(value)), dtype=value.dtype)
