"""What forward changes about tensors apart from their values, which no program can do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree

from tvmify.errors import NeedsPython

with FakeTensorMode():
    #: Attributes that torch gives to tensors while it records.
    _OF_TORCH = frozenset(vars(torch.empty(0)))


class TensorState:
    """The state of a call's arguments before forward runs.

    Parameters
    ----------
    arguments
        Values, tensors among them.
    weights
        The parameters of the module.
    """

    def __init__(self, arguments: Iterable[Any], weights: Iterable[torch.Tensor]) -> None:
        self._weights = {id(weight) for weight in weights}
        self._arguments = [
            (value, value.requires_grad) for value in arguments if isinstance(value, torch.Tensor)
        ]

    def check(self, result: Any) -> None:
        """Refuse what forward has done to its arguments and to the tensors of its result.

        Raises
        ------
        NeedsPython
            It has set an attribute, or turned gradients on or off.
        """
        arguments = [tensor for tensor, _ in self._arguments]
        results = [v for v in pytree.tree_leaves(result) if isinstance(v, torch.Tensor)]
        if any(tensor.requires_grad != before for tensor, before in self._arguments):
            raise NeedsPython(
                "forward sets requires_grad of an argument", "Set it before the call."
            )
        for tensor in (*arguments, *results):
            names = vars(tensor).keys() - _OF_TORCH
            if names := {name for name in names if not name.startswith("_")}:
                raise NeedsPython(
                    f"forward sets the attribute {min(names)} of a tensor", "Return it instead."
                )
        known = {id(tensor) for tensor in arguments} | self._weights
        # Parameters that forward finds in a list or a closure are real.
        for tensor in (tensor for tensor in results if id(tensor) not in known and is_fake(tensor)):
            if isinstance(tensor, nn.Parameter):
                raise NeedsPython("forward returns a new parameter", "Return a tensor.")
            if tensor.requires_grad and tensor.is_leaf:
                raise NeedsPython(
                    "forward calls requires_grad_() of a result", "Call it after forward."
                )
