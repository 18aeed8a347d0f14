"""Compile a module or a function, run it, and compare it with eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import ExportedProgram

from tests.tolerances import assert_close_to_reference
from tvmify.artifact import Artifact
from tvmify.compiler import compile
from tvmify.compiler.environment import prepare_tvm
from tvmify.runtime import Executor, PackedWeights, cpu_features, flatten
from tvmify.target import Target, target_for
from tvmify.torch_compat.recurrent_shapes import recurrent_shapes

if TYPE_CHECKING:
    from tvm import IRModule


class Program(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@cache
def target() -> Target:
    """This machine."""
    return target_for(None, "cpu", cpu_features())


def as_module(program: Callable[..., Any]) -> nn.Module:
    return program.eval() if isinstance(program, nn.Module) else Program(program)


def recorded(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **options: Any
) -> ExportedProgram:
    """Record a module, with recurrent layers as the decorator records them.

    `options` are those of ``torch.export.export``.
    """
    with torch.no_grad(), recurrent_shapes():
        return torch.export.export(module, args, kwargs, strict=False, **options)


def compiled(program: Callable[..., Any], *args: Any, **kwargs: Any) -> Artifact:
    """Compile a module, or a function, for these arguments."""
    return compile(recorded(as_module(program), args, kwargs), target())


def scheduled(program: Callable[..., Any], *args: Any) -> tuple[IRModule, dict[str, str]]:
    """Return the functions before the passes for LLVM, and the rule of each kernel.

    Small kernels are merged into one function only after they have their rules.
    """
    prepare_tvm()
    from tvmify.compiler import pipeline
    from tvmify.compiler.frontend.decompositions import decompose
    from tvmify.compiler.frontend.importer import import_program

    machine = pipeline.tvm_target(target())
    with torch.no_grad(), warnings.catch_warnings(), machine:
        warnings.simplefilter("ignore")  # deprecations inside torch
        imported = import_program(decompose(recorded(as_module(program), args)))
    fused = pipeline.fuse(pipeline.lower(imported.ir_mod, machine), machine)
    ir_mod, outcomes = pipeline.schedule(fused, machine)
    rules = {name: str(outcome) for name, outcome in outcomes.items()}
    return pipeline.plan_memory(ir_mod, machine), rules


def executed(artifact: Artifact, program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an artifact with the weights of a module."""
    module = as_module(program)
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    executor = Executor(artifact)
    weights, state = ([tensors[n] for n in names] for names in (artifact.weights, artifact.state))
    executor.bind(weights, PackedWeights(), state)
    leaves, _ = flatten(args, kwargs)
    result = executor.call()(leaves)
    if result is NotImplemented:  # a call that fails goes to eager: raise its error
        executor.compiled.forward([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    return result


def check_values(
    artifact: Artifact, program: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Run an artifact, and compare with eager and float64."""
    with torch.no_grad():
        result = executed(artifact, program, *args, **kwargs)
    assert_close_to_reference(result, as_module(program), args, kwargs)


def check(program: Callable[..., Any], *args: Any, **kwargs: Any) -> Artifact:
    """Compile, run, compare with eager and float64; nothing is bridged or unscheduled."""
    artifact = compiled(program, *args, **kwargs)
    check_values(artifact, program, *args, **kwargs)
    assert artifact.report["unscheduled"] == 0, artifact.report["kernels"]
    assert not artifact.report["bridged"], artifact.report["bridged"]
    return artifact


def is_fused(artifact: Artifact) -> bool:
    """Whether attention is one kernel in the program."""
    return "attention" in artifact.report["kernels"].values()


def check_each(functions: dict[str, Callable[..., Any]], *args: Any) -> Artifact:
    """Check many small functions of the same arguments in one program."""
    return check(lambda *given: {name: f(*given) for name, f in functions.items()}, *args)


def with_specials(*shape: int) -> torch.Tensor:
    """Random numbers that include NaN, both infinities and both zeros."""
    x = torch.randn(*shape)
    flat = x.view(-1)
    for start, value in enumerate((float("nan"), float("inf"), float("-inf"), 0.0, -0.0)):
        flat[start::11] = value
    return x
