"""Build one small Relax program for many shapes, and run it for some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from tests.compiler.kernels.kernels import NATIVE, Array, Describe
from tvmify.compiler import pipeline, sizes
from tvmify.compiler.codegen.build import generate
from tvmify.compiler.codegen.packing import packed_keys
from tvmify.compiler.sizes import Range

#: Sizes around the edges of tiles and vectors.
EDGES = (2, 7, 8, 9, 15, 16, 17, 31, 97)


@dataclass
class Symbolic:
    """A planned program with symbols among its sizes, and the outcome for each of its functions."""

    ir_mod: tvm.IRModule
    report: dict[str, str]
    packed: tuple[str, ...]
    target: tvm.target.Target

    @property
    def rules(self) -> set[str]:
        """Rules of the functions that run with every call."""
        return {rule for name, rule in self.report.items() if "pack" not in name}

    @cached_property
    def _machine(self) -> relax.VirtualMachine:
        executable = generate(self.ir_mod, self.target, "bytecode", threads=1).executable
        return relax.VirtualMachine(executable, tvm.cpu())

    def run(self, inputs: Sequence[Array], weights: Sequence[Array] = ()) -> list[Array]:
        """Run on arrays."""
        arguments = [tvm.runtime.tensor(value) for value in inputs]
        if weights:
            arguments += self._machine["pack"](*(tvm.runtime.tensor(value) for value in weights))
        return [result.numpy() for result in self._machine["main"](*arguments)]


def build(
    describe: Describe,
    inputs: Iterable[tuple[Sequence[int | str], str]],
    weights: Sequence[Array] = (),
    *,
    hint: int = 48,
    most: int = 512,
    target: tvm.target.Target = NATIVE,
) -> Symbolic:
    """Lower, fuse, schedule and plan a program.

    Parameters
    ----------
    describe
        Called with a block builder and one variable for each tensor; returns the result.
    inputs
        Shapes and dtypes; a name in a shape is a symbol.
    weights
        Arrays of their shapes and dtypes.
    hint, most
        The hint and the largest value of each symbol.
    """
    symbols: dict[str, tirx.Var] = {}

    def size(given: int | str) -> Any:
        if isinstance(given, int):
            return given
        return symbols.setdefault(given, tirx.Var(given, "int64"))

    types = [relax.TensorType([*map(size, shape)], dtype) for shape, dtype in inputs]
    count = len(types)
    types += [relax.TensorType(array.shape, str(array.dtype)) for array in weights]
    variables = [relax.Var(f"v{i}", kind) for i, kind in enumerate(types)]
    with sizes.symbols({name: Range(hint, 2, most) for name in symbols}):
        builder = relax.BlockBuilder()
        with builder.function("main", variables, attrs={"num_input": count}):
            with builder.dataflow():
                described = builder.emit(describe(builder, *variables))
                results = [described]
                if isinstance(described.ty, relax.TupleType):
                    each = range(len(described.ty.fields))
                    results = [builder.emit(relax.TupleGetItem(described, i)) for i in each]
                result = builder.emit_output(relax.Tuple(results))
            builder.emit_func_output(result)
        lowered = pipeline.lower(builder.get(), target)
        packed = packed_keys(lowered, [f"w{i}" for i in range(len(weights))])
        scheduled, outcomes = pipeline.schedule(pipeline.fuse(lowered, target), target)
        planned = pipeline.plan_memory(scheduled, target)
    report = {name: str(outcome) for name, outcome in outcomes.items()}
    return Symbolic(planned, report, packed, target)


def check(
    program: Symbolic,
    reference: Callable[..., Any],
    inputs: Sequence[Array],
    weights: Sequence[Array] = (),
    *,
    tolerance: float = 3e-6,
) -> None:
    """Run a program, and compare it with float64; the tolerance is relative to the largest."""
    wide = [a if a.dtype.kind in "biu" else a.astype(np.float64) for a in (*inputs, *weights)]
    expected = reference(*wide)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for got, want in zip(program.run(inputs, weights), expected, strict=True):
        assert got.shape == want.shape
        assert np.array_equal(np.isnan(got), np.isnan(want))
        if got.dtype.kind in "biu":
            assert np.array_equal(got, want)
            continue
        finite = np.isfinite(want)
        scale = max(float(np.abs(want[finite]).max(initial=0.0)), 1e-30)
        assert float(np.abs(got - want)[finite].max(initial=0.0)) <= tolerance * scale
