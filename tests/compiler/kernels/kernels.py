"""Build small Relax programs as for users, run them, and inspect their loops."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, tirx
from tvm.tirx.build import codegen_build

from tvmify.compiler import pipeline
from tvmify.compiler.codegen.build import generate
from tvmify.compiler.codegen.lowering import lower
from tvmify.compiler.environment import prepare_tvm
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.runtime.native import cpu_features
from tvmify.system.workers import Workers

prepare_tvm()
Array = np.ndarray[Any, Any]

_X86 = {"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": "x86-64"}
_AVX2 = ["+avx", "+avx2", "+fma", "+f16c"]
_AVX512 = ["+avx512f", "+avx512bw", "+avx512cd", "+avx512dq", "+avx512vl"]

AVX512 = tvm.target.Target({**_X86, "mattr": _AVX2 + _AVX512})
AVX2 = tvm.target.Target({**_X86, "mattr": _AVX2})
_AARCH64 = {"kind": "llvm", "mtriple": "aarch64-unknown-linux-gnu", "mcpu": "generic"}
_SVE = ["+bf16", "+dotprod", "+fullfp16", "+i8mm", "+neon", "+sve"]
NEON = tvm.target.Target({**_AARCH64, "mattr": ["+neon"]})
SVE = tvm.target.Target({**_AARCH64, "mattr": _SVE})


def runnable(*features: str) -> bool:
    """Whether this machine has such instructions."""
    return set(features) <= set(cpu_features())


def _param(target: tvm.target.Target, name: str, *features: str) -> Any:
    lacking = pytest.mark.skipif(not runnable(*features), reason=f"no {name}")
    return pytest.param(target, id=name, marks=lacking)


#: Targets to run on, each skipped if the processor lacks it.
if platform.machine() == "aarch64":
    TARGETS = [_param(NEON, "neon", "neon"), _param(SVE, "sve", *(name[1:] for name in _SVE))]
    NATIVE = SVE if runnable(*(name[1:] for name in _SVE)) else NEON
else:
    TARGETS = [_param(AVX512, "avx512", "avx512f"), _param(AVX2, "avx2", "avx2", "fma")]
    NATIVE = AVX512 if runnable("avx512f") else AVX2

Describe = Callable[..., relax.Expr]


@dataclass
class Built:
    """A program and the outcome for each of its functions."""

    ir_mod: tvm.IRModule
    report: dict[str, str]
    target: tvm.target.Target

    @property
    def rules(self) -> set[str]:
        """Rules of the functions that run with every call."""
        return {rule for name, rule in self.report.items() if "pack" not in name}

    def kernel(self) -> tirx.PrimFunc:
        """The only function that runs with every call."""
        (name,) = (name for name in self.report if "pack" not in name)
        return self.ir_mod[name]

    @cached_property
    def machine(self) -> relax.VirtualMachine:
        """The program, lowered as for users."""
        planned = pipeline.plan_memory(self.ir_mod, self.target)
        executable = generate(planned, self.target, "bytecode", threads=1).executable
        return relax.VirtualMachine(executable, tvm.cpu())

    def run(self, inputs: Sequence[Array], weights: Sequence[Array] = ()) -> Array:
        """Run on arrays; packs the weights first."""
        machine = self.machine
        arguments = [tvm.runtime.tensor(value) for value in inputs]
        if weights:
            arguments += machine["pack"](*(tvm.runtime.tensor(value) for value in weights))
        (result,) = machine["main"](*arguments)
        return result.numpy()

    def lowered(self) -> tvm.IRModule:
        """The kernel alone, lowered as for users."""
        function = self.kernel().with_attr("global_symbol", "main")
        return lowered(tvm.IRModule({"main": function}), self.target)

    def assembly(self) -> str:
        """The assembly of the kernel alone."""
        return assembly(self.kernel(), self.target)


def assembly(function: tirx.PrimFunc, target: tvm.target.Target) -> str:
    """Return the assembly of a scheduled function, made as for users."""
    ir_mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    return codegen_build(lowered(ir_mod, target), target).inspect_source("s")


def executable(function: tirx.PrimFunc, target: tvm.target.Target = NATIVE) -> Any:
    """Build a scheduled function as for users, into something that can be called."""
    ir_mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    return codegen_build(lowered(ir_mod, target), target)["main"]


def lowered(ir_mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Lower scheduled functions to the input of LLVM."""
    functions, for_gpu = lower(ir_mod, target, Workers(2))
    assert for_gpu is None
    return functions


def build(
    describe: Describe,
    inputs: Sequence[Array],
    weights: Sequence[Array] = (),
    target: tvm.target.Target = NATIVE,
) -> Built:
    """Lower, fuse and schedule a program.

    Parameters
    ----------
    describe
        Called with a block builder and one variable for each array; returns the result.
    inputs, weights
        Arrays of the shapes and dtypes that the program is for.
    """
    arrays = [*inputs, *weights]
    types = [relax.TensorType(array.shape, str(array.dtype)) for array in arrays]
    variables = [relax.Var(f"v{i}", kind) for i, kind in enumerate(types)]
    builder = relax.BlockBuilder()
    with builder.function("main", variables, attrs={"num_input": len(inputs)}):
        with builder.dataflow():
            described = builder.emit(describe(builder, *variables))
            results = [described]
            if isinstance(described.ty, relax.TupleType):
                count = len(described.ty.fields)
                results = [builder.emit(relax.TupleGetItem(described, i)) for i in range(count)]
            result = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(result)
    fused = pipeline.fuse(pipeline.legalize(builder.get(), target), target)
    ir_mod, outcomes = pipeline.schedule(fused, target)
    report = {name: str(outcome) for name, outcome in outcomes.items()}
    return Built(ir_mod, report, target)


def use_rules(monkeypatch: pytest.MonkeyPatch, *rules: Rule) -> None:
    """Use only these rules for CPUs."""
    own = replace(pipeline.CPU, rules={rule.name: rule for rule in rules})
    monkeypatch.setitem(pipeline._BACKENDS, "llvm", own)


def check(
    describe: Describe,
    reference: Callable[..., Array],
    inputs: Sequence[Array],
    weights: Sequence[Array] = (),
    *,
    rule: str,
    target: tvm.target.Target = NATIVE,
    tolerance: float = 3e-6,
) -> Built:
    """Run a program, compare it with float64, and assert which rule scheduled it.

    The tolerance is relative to the largest magnitude of the result.
    """
    built = build(describe, inputs, weights, target)
    assert built.rules == {rule}, built.report
    actual = built.run(inputs, weights)
    # NumPy does not classify bfloat16 as a number.
    wide = [a if a.dtype.kind in "biu" else a.astype(np.float64) for a in (*inputs, *weights)]
    expected = reference(*wide)
    assert actual.shape == expected.shape
    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-30)
    assert float(np.abs(actual - expected).max(initial=0.0)) <= tolerance * scale
    return built


def loops(function: tirx.PrimFunc) -> list[tirx.For]:
    """All loops of a function, outermost first."""
    found: list[tirx.For] = []

    def visit(stmt: Any) -> None:
        if isinstance(stmt, tirx.For):
            found.append(stmt)
            visit(stmt.body)
        elif isinstance(stmt, tirx.SeqStmt):
            for part in stmt.seq:
                visit(part)
        elif isinstance(stmt, s_tir.SBlockRealize):
            visit(stmt.block.body)
        elif isinstance(stmt, tirx.IfThenElse):
            visit(stmt.then_case)
            if stmt.else_case is not None:
                visit(stmt.else_case)

    visit(function.body)
    return found


def has_parallel_loop(function: tirx.PrimFunc) -> bool:
    """Whether the function forks."""
    return any(loop.kind == tirx.ForKind.PARALLEL for loop in loops(function))


def widest_vector(function: tirx.PrimFunc) -> int:
    """Lanes of the widest vectorized loop."""
    wide = [int(loop.extent) for loop in loops(function) if loop.kind == tirx.ForKind.VECTORIZED]
    return max(wide, default=1)


def random(*shape: int, seed: int = 0, dtype: str = "float32") -> Array:
    """Return normal numbers; use another seed for each argument."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
