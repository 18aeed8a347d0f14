"""Small graphs of ATen operators, and calls of them from inside of the compiled program.

They are what `tvmify.compiler.aten.bridge` makes of an operator of the program, written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm
from torch._C import Graph
from tvm import relax
from tvm.ir import Expr

from tvmify.artifact import CALL_OF_TORCH
from tvmify.compiler.aten.bridge import example, insert


class Aten:
    """A graph of ATen operators, as they are written down."""

    def __init__(self) -> None:
        self.graph = Graph()

    def __call__(self, operator: str, *arguments: Any) -> Any:
        """Add a call; arguments that are no values of the graph are constants."""
        values = [
            x if isinstance(x, torch._C.Value) else self.graph.insertConstant(x) for x in arguments
        ]
        return insert(self.graph, f"aten::{operator}", values)[0]


def aten(
    tensors: Sequence[Expr],
    shape: Sequence[int],
    dtype: str,
    body: Callable[..., Any],
) -> relax.Call:
    """Return a call of PyTorch.

    Parameters
    ----------
    tensors
        Given to the graph, contiguous.
    shape, dtype
        Of the result, which is made contiguous if it is not.
    body
        Takes an `Aten` and the graph's values of the tensors, and returns that of the result.
    """
    record = Aten()
    result = body(record, *(record.graph.addInput(f"x{i}") for i in range(len(tensors))))
    result.inferTypeFrom(example(list(shape), dtype))
    record.graph.registerOutput(result)
    text = tvm.ir.StringImm(str(record.graph))
    return relax.op.call_pure_packed(
        CALL_OF_TORCH, text, *tensors, ty_args=[relax.TensorType(list(shape), dtype)]
    )


def multiply(record: Aten, left: Any, right: Any, *bias: Any, turned: bool) -> Any:
    """Add a matrix product, and a bias if there is one.

    `turned` says that the right-hand side lies in memory the other way around, as the weight of a
    linear layer does.
    """
    if bias:
        weight = right if turned else record("transpose", right, -2, -1)
        return record("linear", left, weight, *bias)
    right = record("transpose", right, -2, -1) if turned else right
    return record("matmul", left, right)
