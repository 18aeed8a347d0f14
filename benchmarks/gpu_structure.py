"""What programs for a GPU consist of, counted without one: launches, memory traffic, registers.

    python -m benchmarks.gpu_structure [--arch sm_90a] [--cases 'resnet50*']

Prints a Markdown table with a row for each case of `benchmarks.gpu_worker`. A launch is one of our
kernels, or an operator that PyTorch computes, which may launch several. Bytes count each operand
and result once, without the effect of caches or the scratch memory of libraries. Registers are
those of our kernel that needs the most, as ptxas reports them.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu_worker import CASES, loaded
from benchmarks.models import chosen
from tvmify.target import target_for
from tvmify.torch_compat.silence import silenced

#: Operators that return a view: PyTorch launches nothing for them.
VIEWS = frozenset(
    "expand permute reshape select slice squeeze t transpose unsqueeze view flatten".split()
)


@dataclass
class Structure:
    """What one program does in a call.

    Attributes
    ----------
    kernels
        Calls of our own kernels, by the rule that scheduled them.
    operators
        Calls of PyTorch's operators, by name, without views.
    moved
        Bytes that all of these read and write.
    registers
        Registers per thread of each of our kernels.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    registers: list[int] = field(default_factory=list)

    def row(self, name: str) -> str:
        """Return the row of the table."""
        ours, theirs = self.kernels.total(), self.operators.total()
        counts = ", ".join(f"{count} {name}" for name, count in self.operators.most_common())
        most = max(self.registers, default=0)
        columns = [name, ours + theirs, ours, counts, f"{self.moved / 1e6:.0f}", most]
        return f"| {' | '.join(map(str, columns))} |"


HEAD = """| case | launches | our kernels | PyTorch's operators | MB moved | registers |
| --- | --- | --- | --- | --- | --- |"""


def main(arguments: list[str] | None = None) -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description="The structure of programs for a GPU.")
    parser.add_argument("--arch", default="sm_90a", help="GPU architecture (default: sm_90a)")
    parser.add_argument("--cases", default="*", help="names or patterns (default: all)")
    given = parser.parse_args(arguments)
    try:
        names = chosen(given.cases, list(CASES))
    except ValueError as error:
        parser.error(str(error))
    print(HEAD, flush=True)
    for name in names:
        module, args = loaded(CASES[name], "cpu")
        print(structure(module, args, given.arch).row(name), flush=True)


def structure(
    module: torch.nn.Module, args: tuple[torch.Tensor, ...], arch: str = "sm_90a"
) -> Structure:
    """Compile a module for a GPU, and return the structure of the program."""
    from tvmify.compiler.environment import prepare_tvm

    prepare_tvm()
    from tvmify.compiler import pipeline
    from tvmify.compiler.codegen import build
    from tvmify.compiler.frontend.decompositions import decompose
    from tvmify.compiler.frontend.importer import import_program

    target = pipeline.tvm_target(target_for({"kind": "cuda", "arch": arch}, "cpu", ()))
    with torch.no_grad(), silenced():
        exported = torch.export.export(module, args, strict=False)
    with target, silenced():
        imported = import_program(decompose(exported))
    fused = pipeline.fuse(pipeline.lower(imported.ir_mod, target), target)
    scheduled, outcomes = pipeline.schedule(fused, target)
    found = Structure()
    _count(scheduled, {name: str(outcome.rule) for name, outcome in outcomes.items()}, found)
    generated = build.generate(pipeline.plan_memory(scheduled, target), target)
    if generated.kernels is not None:
        found.registers = registers(generated.kernels.source, arch)
    return found


def _count(ir_mod: object, rules: dict[str, str], found: Structure) -> None:
    from tvmify.artifact import CALL_OF_TORCH

    main = ir_mod["main"]  # type: ignore[index]
    for block in main.body.blocks:
        for binding in block.bindings:
            call = binding.value
            name = str(getattr(getattr(call, "op", None), "name", ""))
            if name in ("relax.call_tir", "relax.call_tir_with_grad"):
                variable, operands, *_ = call.args
                found.kernels[rules[variable.name_hint]] += 1
                found.moved += _bytes(operands.ty) + _bytes(binding.var.ty)
            elif name == "relax.call_pure_packed" and call.args[0].global_symbol == CALL_OF_TORCH:
                operators = list(_operators(str(call.args[1].value)))
                found.operators.update(operators)
                if operators:
                    reads = sum(_bytes(operand.ty) for operand in call.args[2:])
                    found.moved += reads + _bytes(binding.var.ty)


def _operators(graph: str) -> Iterator[str]:
    for name in re.findall(r"aten::(\w+)\(", graph):
        if name not in VIEWS:
            yield name


def _bytes(ty: object) -> int:
    fields = getattr(ty, "fields", None)
    if fields is not None:
        return sum(map(_bytes, fields))
    shape, dtype = getattr(ty, "shape", None), str(getattr(ty, "dtype", "") or "")
    if shape is None or not dtype:
        return 0
    bits = 8 if dtype == "bool" else int(re.sub(r"\D*", "", dtype.partition("x")[0]))
    return math.prod(int(extent) for extent in shape.values) * bits // 8


def registers(source: str, arch: str) -> list[int]:
    """Return how many registers a thread of each kernel needs."""
    from tvmify.compiler.cuda import nvcc

    compiler = nvcc.find()
    if compiler is None:
        raise FileNotFoundError(nvcc.INSTALL)
    with tempfile.TemporaryDirectory(prefix="tvmify-") as folder:
        given, made = Path(folder, "kernels.cu"), Path(folder, "kernels.fatbin")
        given.write_text(source)
        command = [compiler, f"-arch={arch}", "--resource-usage", *nvcc.OPTIONS, "-o", made, given]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(number) for number in re.findall(r"Used (\d+) registers", done.stderr)]


if __name__ == "__main__":
    main()
