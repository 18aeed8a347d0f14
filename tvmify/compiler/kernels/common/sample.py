"""One or a few operators, with their shapes in a program, as a program of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import tvm
from tvm import relax

from tvmify.compiler.passes.views import static_shape


@dataclass(frozen=True)
class Sample:
    """A small program to measure.

    Attributes
    ----------
    types
        The types of the operands and, last, of the result.
    weights
        Whether each operand depends on weights only, and is packed beforehand.
    body
        Emits the operators, and returns the result.
    multiply_adds
        Their cost; None for that of a matrix product of these sizes.
    """

    types: Sequence[relax.TensorType]
    weights: tuple[bool, ...]
    body: Callable[[relax.BlockBuilder, list[relax.Var]], relax.Expr]
    multiply_adds: float | None = None

    @classmethod
    def of(cls, call: relax.Call, weights: tuple[bool, ...]) -> Sample:
        """Return one operator, all of whose arguments are tensors."""

        def again(_: relax.BlockBuilder, operands: list[relax.Var]) -> relax.Expr:
            return relax.Call(call.op, operands, call.attrs, call.ty_args)

        sample = cls([*(argument.ty for argument in call.args), call.ty], weights, again)
        # Each of a convolution's groups sees as many times fewer channels.
        groups = int(getattr(call.attrs, "groups", 1))
        return replace(sample, multiply_adds=sample.work / math.sqrt(groups))

    @property
    def work(self) -> float:
        """About how many multiply-adds it takes: exactly those, if it is a matrix product."""
        if self.multiply_adds is not None:
            return self.multiply_adds
        return math.sqrt(math.prod(float(math.prod(static_shape(ty))) for ty in self.types))

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return random inputs and weights for it, the same every time."""
        generator = torch.Generator().manual_seed(0)
        inputs: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        for ty, fixed in zip(self.types, self.weights, strict=False):
            values = torch.randn(static_shape(ty), generator=generator).to(
                getattr(torch, str(ty.dtype))
            )
            (weights if fixed else inputs).append(values)
        return inputs, weights

    def ir_mod(self) -> tvm.IRModule:
        """Return it as a program."""
        operands = [relax.Var(f"x{i}", ty) for i, ty in enumerate(self.types[:-1])]
        fixed = list(zip(operands, self.weights, strict=True))
        parameters = [v for v, is_fixed in fixed if not is_fixed] + [v for v, f in fixed if f]
        builder = relax.BlockBuilder()
        attributes = {"num_input": self.weights.count(False)}
        with builder.function("main", parameters, attrs=attributes):
            with builder.dataflow():
                result = builder.emit(self.body(builder, operands))
                result = builder.emit_output(relax.Tuple([result]))
            builder.emit_func_output(result)
        return builder.finalize()
