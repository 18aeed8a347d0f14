"""Profile a compiled model: every kernel, with its rule, speed and share of the time.

    python -m benchmarks.kernels resnet18 [--threads 2] [--calls 30] [--top 20] [--accuracy strict]
        [--dtype bfloat16]

Kernels are timed in place, on real activations, by an instrument of TVM's virtual machine. The
instrument, and TVM's own threads instead of PyTorch's, add up to 40 microseconds per kernel. `make
bench` measures the whole model without them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree

from benchmarks.models import DTYPES, MODELS, build, in_dtype
from tvmify.capture import capture, resolve
from tvmify.compiler.frontend.dtypes import dtype_name
from tvmify.runtime import cpu_features
from tvmify.target import target_for

MILLISECONDS = 1e3


@dataclass
class Kernel:
    """One call of a kernel in the program.

    Attributes
    ----------
    name, rule
        Names of its function and of the schedule rule that made it; "merged" if there were several.
    operations
        Floating-point operations of its loops. Algorithms that save some, such as Winograd's, count
        what they compute, not what the convolution would. A pair of bfloat16 counts as one number.
    shapes
        Shapes of its arguments; the last is the result's.
    bytes
        Total size of all arguments.
    times
        Milliseconds of each call.
    """

    name: str
    rule: str
    operations: float
    shapes: list[str]
    bytes: int
    times: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """Median of its calls."""
        return statistics.median(self.times)


class Program:
    """A model compiled by tvmify, in a virtual machine that can be instrumented."""

    def __init__(self, model: str, accuracy: str = "default") -> None:
        module, args = build(model)
        program = capture(module, args, {})
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch and TVM
            self._compile(program.export(args, {}), accuracy)
        leaves = pytree.tree_leaves((args, {}))
        weights = [resolve(module, name).detach() for name in self.weights]
        import tvm

        # Copies: torch's own memory may be aligned less than kernels rely on.
        def copied(x: torch.Tensor) -> tvm.runtime.Tensor:
            copy = tvm.runtime.empty(tuple(x.shape), dtype_name(x.dtype))
            torch.from_dlpack(copy).copy_(x)
            return copy

        self.arguments = [copied(leaves[i]) for i in self.inputs]
        if weights:
            given = [copied(weight) for weight in weights]
            self.arguments += list(self.machine["pack"](*given))

    def _compile(self, exported: torch.export.ExportedProgram, accuracy: str) -> None:
        # The stages of `tvmify.compiler.compile`, but for TVM's virtual machine.
        from tvmify.compiler.environment import prepare_tvm

        prepare_tvm()
        import tvm
        from tvm import relax

        from tvmify.compiler import pipeline
        from tvmify.compiler.codegen import build
        from tvmify.compiler.frontend.decompositions import decompose
        from tvmify.compiler.frontend.importer import import_program
        from tvmify.compiler.kernels.common import choice
        from tvmify.compiler.passes.name_kernels import PREFIX

        target = pipeline.tvm_target(target_for("llvm", "cpu", cpu_features()))
        with target:
            imported = import_program(decompose(exported))
        with choice.choosing(choice.Choices(accuracy)):
            fused = pipeline.fuse(pipeline.lower(imported.ir_mod, target), target)
        self.operations: dict[str, float] = {}
        for variable, function in fused.functions_items():
            if isinstance(function, tvm.tirx.PrimFunc):
                self.operations[PREFIX + variable.name_hint] = _operations(function)
        scheduled, outcomes = pipeline.schedule(fused, target)
        self.rules = {PREFIX + name: str(outcome) for name, outcome in outcomes.items()}
        # Not `relax.build`, which lacks our passes between schedule and LLVM.
        generated = build.generate(pipeline.plan_memory(scheduled, target), target, "bytecode")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "library.so")
            library.write_bytes(build.link(generated))
            executable = tvm.runtime.load_module(str(library))
        self.machine = relax.VirtualMachine(executable, tvm.cpu())  # type: ignore[arg-type]
        self.inputs, self.weights = imported.inputs, imported.weights

    def call(self) -> Any:
        """Run the program once."""
        return self.machine["main"](*self.arguments)

    def measure(self, calls: int) -> tuple[list[Kernel], float]:
        """Return the kernels in call order, and the median ms of a call without the instrument.

        Parameters
        ----------
        calls
            The number of calls, after some to warm up.
        """
        for _ in range(3):
            self.call()
        whole = statistics.median(_timed(self.call) for _ in range(calls))
        kernels: list[Kernel] = []
        position, begun = 0, 0.0

        def watch(_: Any, name: str, before: bool, __: Any, *args: Any) -> None:
            nonlocal position, begun
            if name.startswith("vm."):
                return  # memory, shapes and views
            if before:
                if position == len(kernels):
                    kernels.append(self._kernel(name, args))
                begun = time.perf_counter()
            else:
                kernels[position].times.append((time.perf_counter() - begun) * MILLISECONDS)
                position += 1

        self.machine.set_instrument(watch)  # type: ignore[arg-type]
        for _ in range(calls):
            position = 0
            self.call()
        return kernels, whole

    def _kernel(self, name: str, args: tuple[Any, ...]) -> Kernel:
        tensors = [arg for arg in args if hasattr(arg, "shape")]
        shapes = ["×".join(str(size) for size in tensor.shape) for tensor in tensors]
        size = sum(torch.from_dlpack(tensor).nbytes for tensor in tensors)
        return Kernel(
            name, self.rules.get(name, "merged"), self.operations.get(name, 0.0), shapes, size
        )


def show(kernels: list[Kernel], whole: float, top: int, console: Console) -> None:
    """Print the slowest kernels, and totals by rule."""
    total = sum(kernel.median_ms for kernel in kernels)
    title = f"{len(kernels)} kernels, {total:.2f} ms; a call without the watch {whole:.2f} ms"
    table = Table("kernel", "rule", "arguments", title=title, title_justify="left", box=None)
    for heading in ("ms", "share", "GFLOP/s", "GB/s"):
        table.add_column(heading, justify="right")
    slowest = sorted(kernels, key=lambda kernel: -kernel.median_ms)
    for kernel in slowest[:top]:
        taken = kernel.median_ms
        table.add_row(
            kernel.name.removeprefix("tvmify_"),
            kernel.rule,
            " ".join(kernel.shapes[:-1]) + " → " + kernel.shapes[-1],
            f"{taken:.3f}",
            f"{taken / total:.1%}",
            f"{kernel.operations / taken / 1e6:.0f}",
            f"{kernel.bytes / taken / 1e6:.1f}",
        )
    console.print(table)
    rules: dict[str, list[float]] = {}
    for kernel in kernels:
        rules.setdefault(kernel.rule, []).append(kernel.median_ms)
    for rule, times in sorted(rules.items(), key=lambda item: -sum(item[1])):
        console.print(f"{rule}: {len(times)} calls, {sum(times):.2f} ms, {sum(times) / total:.0%}")


def _operations(function: Any) -> float:
    """Return the floating-point operations of a kernel, 0 where TVM cannot count them."""
    import tvm
    from tvm.s_tir.analysis import estimate_tir_flops

    try:
        return estimate_tir_flops(tvm.IRModule({"main": function}))
    except tvm.error.InternalError:  # it knows no `let`, for example
        return 0.0


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * MILLISECONDS


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description="Time every kernel of a compiled model.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--top", type=int, default=20, help="how many kernels to show")
    parser.add_argument("--accuracy", choices=("default", "strict"), default="default")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    given = parser.parse_args()
    # For TVM's own threads; bound to cores, two of them can end up on one.
    os.environ |= {"TVM_NUM_THREADS": str(given.threads), "TVM_BIND_THREADS": "0"}
    kernels, whole = Program(in_dtype(given.model, given.dtype), given.accuracy).measure(
        given.calls
    )
    show(kernels, whole, given.top, Console(width=200))


if __name__ == "__main__":
    main()
