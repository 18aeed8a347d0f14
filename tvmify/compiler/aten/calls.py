"""Small graphs of ATen operators, called from inside the compiled program. They are like those that
`tvmify.compiler.aten.bridge` makes from an operator, but written by hand.
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
    """A graph of ATen operators under construction."""

    def __init__(self) -> None:
        self.graph = Graph()

    def __call__(self, operator: str, *arguments: Any) -> Any:
        """Add a call; arguments that are not values of the graph are constants."""
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
        The arguments of the graph, made contiguous.
    shape, dtype
        Shape and dtype of the result, which is made contiguous.
    body
        Takes an `Aten` and the graph's values for the tensors, and returns the value of the result.
    """
    record = Aten()
    result = body(record, *(record.graph.addInput(f"x{i}") for i in range(len(tensors))))
    result.inferTypeFrom(example(list(shape), dtype))
    record.graph.registerOutput(result)
    text = tvm.ir.StringImm(str(record.graph))
    return relax.op.call_pure_packed(
        CALL_OF_TORCH, text, *tensors, ty_args=[relax.TensorType(list(shape), dtype)]
    )


def multiply(record: Aten, left: Any, right: Any, *bias: Any, transposed: bool) -> Any:
    """Add a matrix product, and a bias if there is one.

    `transposed`: the right-hand side is transposed in memory, like the weight of a linear layer.
    """
    if bias:
        weight = right if transposed else record("transpose", right, -2, -1)
        return record("linear", left, weight, *bias)
    right = record("transpose", right, -2, -1) if transposed else right
    return record("matmul", left, right)
