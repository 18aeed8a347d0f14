"""Single operators of a program, each as a program of its own: what is measured to choose."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from torch.utils import _pytree as pytree
from tvm import relax

from tvmify.artifact import Artifact
from tvmify.compiler import build, pipeline
from tvmify.compiler.packing import packed_keys
from tvmify.compiler.schedule import schedule
from tvmify.compiler.schedule.choice import Choices, choosing
from tvmify.compiler.schedule.legalizing import is_weight
from tvmify.structure import structure_text
from tvmify.target import Target

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

#: TVM keeps its block builders on one stack for all threads.
_LOWERING = threading.Lock()


@dataclass(frozen=True)
class Sample:
    """One operator with the shapes it has in a program.

    Attributes
    ----------
    call
        As the legalizer saw it.
    weights
        For each operand whether it depends on weights alone, so that it is packed beforehand.
    """

    call: relax.Call
    weights: tuple[bool, ...]

    @property
    def work(self) -> float:
        """About how many multiply-adds it takes: exactly those, if it is a matrix product."""
        tensors = [argument.ty for argument in self.call.args] + [self.call.ty]
        return math.sqrt(math.prod(float(math.prod(_shape(ty))) for ty in tensors))

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return random inputs and weights for it, the same every time."""
        generator = torch.Generator().manual_seed(0)
        inputs: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        for argument, fixed in zip(self.call.args, self.weights, strict=True):
            dtype = getattr(torch, str(argument.ty.dtype))
            values = torch.randn(_shape(argument.ty), generator=generator).to(dtype)
            (weights if fixed else inputs).append(values)
        return inputs, weights

    def ir_mod(self) -> tvm.IRModule:
        """Return the operator as a program."""
        operands = [relax.Var(f"x{i}", a.ty) for i, a in enumerate(self.call.args)]
        fixed = list(zip(operands, self.weights, strict=True))
        parameters = [v for v, is_fixed in fixed if not is_fixed] + [v for v, f in fixed if f]
        builder = relax.BlockBuilder()
        attributes = {"num_input": self.weights.count(False)}
        with builder.function("main", parameters, attrs=attributes):
            with builder.dataflow():
                call = relax.Call(self.call.op, operands, self.call.attrs, self.call.ty_args)
                result = builder.emit_output(relax.Tuple([builder.emit(call)]))
            builder.emit_func_output(result)
        return builder.finalize()


def samples_of(
    ir_mod: tvm.IRModule, target: tvm.target.Target, choices: Choices
) -> dict[str, Sample]:
    """Lower a program to learn its workloads.

    ``choices.asked`` is filled with their candidates. A workload whose operator takes more than
    tensors has no sample.
    """
    found: dict[str, Sample] = {}

    def noting(legalize: Legalize) -> Legalize:
        def legalize_and_note(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
            before = choices.asked.keys() - found.keys()
            result = legalize(builder, call)
            if all(isinstance(argument.ty, relax.TensorType) for argument in call.args):
                sample = Sample(call, tuple(is_weight(builder, a) for a in call.args))
                found.update(dict.fromkeys(choices.asked.keys() - found.keys() - before, sample))
            return result

        return legalize_and_note

    legalizers: dict[str, Any] = {name: noting(f) for name, f in pipeline.LEGALIZERS.items()}
    with choosing(choices):
        pipeline.lower(ir_mod, target, legalizers)
    return found


def compile_sample(sample: Sample, target: tvm.target.Target, choices: Choices) -> Artifact:
    """Compile a sample as these choices have it; several threads may do so at once."""
    names = [f"x{i}" for i, fixed in enumerate(sample.weights) if fixed]
    with _LOWERING, choosing(choices):
        lowered = pipeline.lower(sample.ir_mod(), target)
        packed = packed_keys(lowered, names)
        scheduled, kernels = schedule(pipeline.fuse(lowered, target), target)
        planned = pipeline.plan_memory(scheduled, target)
    generated = build.generate(planned, target)
    return Artifact(
        library=build.link(generated),
        target=str(Target(target.kind.name)),  # it runs here or nowhere
        inputs=tuple(range(sample.weights.count(False))),
        weights=tuple(names) if packed else (),
        packed=packed,
        outputs=(("tensor", 0),),
        output_structure=structure_text(pytree.tree_structure(0)),
        report={"kernels": kernels},
    )


def _shape(ty: relax.TensorType) -> list[int]:
    return [int(extent) for extent in ty.shape.values]
