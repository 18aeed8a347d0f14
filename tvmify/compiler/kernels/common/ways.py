"""Alternative schedules of one function: the rule's choice, or the fastest measured one. Legalizers
choose for one operator; here, the choice is for a fused function. The function determines its
speed, so its hash names the workload. The hash ignores names: equal kernels of all models are
measured once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir import Expr, TensorLoad

from tvmify.compiler.costs import NEST
from tvmify.compiler.kernels.common import choice
from tvmify.compiler.kernels.common.bounds import has_symbols
from tvmify.compiler.kernels.common.inlining import inline_cheap, total_work
from tvmify.compiler.kernels.common.loops import traffic
from tvmify.compiler.kernels.common.merge_axes import merge_axes
from tvmify.compiler.kernels.common.rewriting import DIVISIONS, collect
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.common.sample import Sample
from tvmify.compiler.kernels.common.schedule import Schedule
from tvmify.compiler.microarchitecture import Microarchitecture


@dataclass(frozen=True)
class Way:
    """One way to schedule a function.

    Attributes
    ----------
    vectors
        The most vectors in the innermost loops.
    threads
        Whether threads share the outermost loop.
    """

    vectors: int = 1
    threads: bool = False

    @property
    def work(self) -> float:
        """As many multiply-adds as make `parallel_if_worth` decide this way."""
        return math.inf if self.threads else 0.0

    def __str__(self) -> str:
        return f"{self.vectors} wide" + ", threads" * self.threads


class Several(Rule):
    """A rule that knows several ways to schedule a function."""

    #: Without threads; its own first.
    ways: tuple[Way, ...] = (Way(),)

    def takes(self, sch: s_tir.Schedule) -> bool:
        """Whether the rule applies to a function."""
        raise NotImplementedError

    def nest(
        self, sch: s_tir.Schedule, machine: Microarchitecture, way: Way
    ) -> s_tir.Schedule | None:
        """Schedule, in one way, what is left once everything cheap was inlined."""
        raise NotImplementedError

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function in the rule's own way, unless another was measured to be faster."""
        if not self.takes(sch):
            return None
        function = sch.mod["main"]
        inline_cheap(sch)
        work = total_work(sch)
        moved = traffic(function, work)
        # The decision of the estimate comes first.
        errors = (1, NEST.error, 1 / NEST.error)
        threads = dict.fromkeys(machine.worth_threads(work * e, moved * e) for e in errors)
        ways = [replace(way, threads=forks) for forks in threads for way in self.ways]
        way, time = ways[0], machine.streaming(work, moved)
        if has_symbols(function):  # there is no single size to measure
            merged = merge_axes(sch.mod["main"])
            if merged is None:
                return self.nest(sch, machine, way)
            result = self.nest(Schedule(merged.function), machine, way)
            return None if result is None else Schedule(merged.restored(result.mod["main"]))
        if time > NEST.worth_measuring and choice.is_collecting():
            ways = self._unlike(sch, machine, ways)
            sample = _sample(function, time / machine.nanoseconds(1))
            if sample is not None and len(ways) > 1:
                way = choice.choose(_workload(self.name, function), ways, lambda: sample)
        elif time > NEST.worth_measuring and choice.is_measured():
            way = choice.choose(_workload(self.name, function), ways)
        return self.nest(sch, machine, way)

    def _unlike(
        self, sch: s_tir.Schedule, machine: Microarchitecture, ways: Sequence[Way]
    ) -> list[Way]:
        """Return the first way, and those that make other code than the ways before them.

        Ways that TVM's primitives refuse are left out.
        """
        found: list[tuple[Way, tirx.PrimFunc]] = []
        for way in ways:
            try:
                result = self.nest(sch.copy(), machine, way)
            except s_tir.ScheduleError:  # no way for this function; another error is a bug
                result = None
            if result is None:
                if not found:  # so does the first way, and another rule takes the function
                    return [way]
                continue
            function = result.mod["main"]
            if not any(tvm_ffi.structural_equal(function, other) for _, other in found):
                found.append((way, function))
        return [way for way, _ in found]


def _workload(rule: str, function: tirx.PrimFunc) -> str:
    result = function.params[-1].ty
    shape = "x".join(str(int(size)) for size in result.shape)
    # Attributes hold what passes found out, and may differ between equal functions.
    bare = tirx.PrimFunc(function.params, function.body, function.ret_type)
    return f"{rule} {shape} {result.dtype} {tvm_ffi.structural_hash(bare):016x}"


def _sample(function: tirx.PrimFunc, multiply_adds: float) -> Sample | None:
    """Return a program of one function; None if it does not accept arbitrary numbers."""
    stored: list[tirx.Var] = []
    depends: list[bool] = []

    def note(node: TensorLoad | tirx.BufferStore) -> None:
        if isinstance(node, tirx.BufferStore):
            stored.append(node.buffer)
        # Random indices would be out of range, or all be equal.
        depends.append(any(collect(index, TensorLoad) for index in node.indices))

    def check(division: Expr) -> None:
        depends.append("int" in str(division.ty.dtype) and bool(collect(division.b, TensorLoad)))

    tvm_ffi.structural_walk(
        function.body, [((TensorLoad, tirx.BufferStore), note), (DIVISIONS, check)]
    )
    is_output = [any(tensor.same_as(p) for tensor in stored) for p in function.params]
    # A function without inputs is computed ahead, as if it depended on weights.
    if any(depends) or is_output != sorted(is_output) or len(set(is_output)) == 1:
        return None
    inputs = is_output.count(False)
    types = [relax.TensorType(p.ty.shape, str(p.ty.dtype)) for p in function.params]

    def body(builder: relax.BlockBuilder, operands: list[relax.Var]) -> relax.Expr:
        variable = builder.add_func(function, "kernel")
        outputs = types[inputs:]
        if len(outputs) == 1:
            return relax.call_tir(variable, operands, outputs[0])
        return relax.TupleGetItem(builder.emit(relax.call_tir(variable, operands, outputs)), 0)

    return Sample(types[: inputs + 1], (False,) * inputs, body, multiply_adds)
