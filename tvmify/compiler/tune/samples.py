"""The operators and kernels of a program as separate programs to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tvm
from torch.utils import _pytree as pytree
from tvm import relax

from tvmify.artifact import Artifact
from tvmify.artifact.results import Computed
from tvmify.artifact.structure import structure_text
from tvmify.compiler import pipeline
from tvmify.compiler.backend import Legalize
from tvmify.compiler.codegen import build
from tvmify.compiler.codegen.packing import packed_keys
from tvmify.compiler.kernels.common.choice import Choices, Collected, choosing
from tvmify.compiler.kernels.common.legalizing import is_weight
from tvmify.compiler.kernels.common.sample import Sample
from tvmify.target import Target


def collect(ir_mod: tvm.IRModule, target: tvm.target.Target, choices: Choices) -> Collected:
    """Lower a program, and schedule it, to learn its workloads.

    A workload whose operator takes more than tensors has no sample, unless the operator that
    chooses gives one.
    """
    found: dict[str, Sample] = {}

    def noting(legalize: Legalize) -> Legalize:
        def legalize_and_note(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
            before = collected.candidates.keys() - found.keys()
            result = legalize(builder, call)
            if all(isinstance(argument.ty, relax.TensorType) for argument in call.args):
                weights = tuple(is_weight(builder, argument) for argument in call.args)
                sample = Sample.of(call, weights)
                new = collected.candidates.keys() - found.keys() - before
                found.update(dict.fromkeys(new, sample))
            return result

        return legalize_and_note

    backend = pipeline.backend_of(target)
    legalizers: dict[str, Any] = {name: noting(f) for name, f in backend.legalizers.items()}
    with choosing(replace(choices, is_collecting=True)) as collected:
        lowered = pipeline.lower(ir_mod, target, legalizers)
        if target.kind.name == "llvm":  # rules for GPUs have no alternatives
            pipeline.schedule(_without_packing(pipeline.fuse(lowered, target)), target)
    return replace(collected, samples=found | collected.samples)


def _without_packing(ir_mod: tvm.IRModule) -> tvm.IRModule:
    """Return the functions that run in every call. Packing runs once: its time does not matter."""
    main = {variable: f for variable, f in ir_mod.functions_items() if variable.name_hint != "pack"}
    return relax.transform.DeadCodeElimination()(
        tvm.IRModule(main, global_infos=ir_mod.global_infos)
    )


def lower_sample(
    sample: Sample, target: tvm.target.Target, choices: Choices
) -> Callable[[], Artifact]:
    """Lower and schedule a sample as these choices have it.

    Returns
    -------
    Callable
        Builds it. Several threads may build at once, but only one may lower: TVM keeps its block
        builders on one stack for all threads.
    """
    names = [f"x{i}" for i, fixed in enumerate(sample.weights) if fixed]
    with choosing(choices):
        lowered = pipeline.lower(sample.ir_mod(), target)
        packed = packed_keys(lowered, names)
        scheduled, kernels = pipeline.schedule(pipeline.fuse(lowered, target), target)
        planned = pipeline.plan_memory(scheduled, target)
    arch = {"arch": str(target.attrs["arch"])} if target.kind.name == "cuda" else {}

    def built() -> Artifact:
        return Artifact(
            library=build.link(build.generate(planned, target)),
            target=str(Target(target.kind.name, arch)),  # it runs on this machine only
            inputs=tuple(range(sample.weights.count(False))),
            weights=tuple(names) if packed else (),
            packed=packed,
            outputs=(Computed(0),),
            output_structure=structure_text(pytree.tree_structure(0)),
            report={"kernels": {name: str(outcome) for name, outcome in kernels.items()}},
        )

    return built
