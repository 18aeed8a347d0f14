"""What forward changes about tensors apart from their values, which no program can do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
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
    """

    def __init__(self, arguments: Iterable[Any]) -> None:
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
        known = {id(tensor) for tensor in arguments}
        for tensor in results:
            is_new = id(tensor) not in known and not isinstance(tensor, nn.Parameter)
            if is_new and tensor.requires_grad and tensor.is_leaf:
                raise NeedsPython(
                    "forward calls requires_grad_() of a result", "Call it after forward."
                )
