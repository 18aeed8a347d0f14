"""Utilization of the multiply-add units by the inner loops of AArch64 kernels, from llvm-mca.

    python -m benchmarks.ports [--mca llvm-mca-19] [--only PATTERN] [--assembly]

No AArch64 processor is needed: kernels are only built, and llvm-mca computes the cycles of the loop
with the most multiply-adds if every operand is in L1. LLVM 19 is the first with models of both
cores. ``--assembly`` prints the loops.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.shapes import Shape

#: By LLVM's name of a core: the number of 128-bit multiply-adds that it starts per cycle.
UNITS = {"neoverse-n1": 2, "neoverse-v1": 4}
#: Layers for most of the rules, from few rows to many, and from the stem of a network to its last
#: layer.
SHAPES = (
    "matmul 16x768 768x768",
    "matmul 128x768 768x3072",
    "matmul 512x512 512x512",
    "conv2d 1x28x28x128 to 512 window 1 stride 1 padding 0",
    "conv2d 1x56x56x128 to 128 window 3 stride 2 padding 1",
    "conv2d 1x14x14x512 to 512 window 3 stride 2 padding 1",
    "conv2d 1x224x224x3 to 64 window 3 stride 1 padding 1",
    "conv2d 1x56x56x64 to 64 window 3 stride 1 padding 1",
    "conv2d 1x28x28x128 to 128 window 3 stride 1 padding 1",
    "conv2d 1x14x14x256 to 256 window 3 stride 1 padding 1",
)
_MULTIPLY_ADD = re.compile(r"^\tfmla\tv(\d+)\.4s", re.MULTILINE)
#: Other instructions that write one or two vector registers.
_WRITE = re.compile(r"^\t(?!fmla|st)\w+\t(?:\{ )?[qvsdhb](\d+)(?:\S*, [qsd](\d+))?", re.MULTILINE)
_LABEL = re.compile(r"^(\.LBB\w+):", re.MULTILINE)
_ITERATIONS = 100


@dataclass(frozen=True)
class Loop:
    """The loop of a kernel with the most multiply-adds.

    Attributes
    ----------
    rule
        The schedule rule that made the kernel.
    text
        Its instructions.
    """

    rule: str
    text: str

    @property
    def multiply_adds(self) -> int:
        """Number of instructions that multiply-add four floats to sums that the loop carries.

        Instructions that transform Winograd tiles do not count: they start new sums.
        """
        written = {register for pair in _WRITE.findall(self.text) for register in pair}
        return sum(register not in written for register in _MULTIPLY_ADD.findall(self.text))


def busiest(assembly: str, rule: str) -> Loop:
    """Return the innermost loop with the most multiply-adds.

    Raises
    ------
    ValueError
        No loop has multiply-adds.
    """
    loops: list[Loop] = []
    labels = list(_LABEL.finditer(assembly))
    ends = [*(label.start() for label in labels[1:]), len(assembly)]
    for label, end in zip(labels, ends, strict=True):
        body = assembly[label.end() : end]
        # The loop ends with the branch back to its label.
        back = re.search(rf"^\t(?:b\.\w+|cbn?z|tbn?z)\t.*{re.escape(label[1])}$", body, re.M)
        if back is not None:
            loops.append(Loop(rule, f"{label[0]}{body[: back.end()]}\n"))
    most = max(loops, key=lambda loop: loop.multiply_adds, default=None)
    if most is None or not most.multiply_adds:
        raise ValueError(f"no loop of {rule} adds products of vectors of four floats")
    return most


def loop_of(shape: Shape, cpu: str) -> Loop:
    """Build the kernel of a layer for a processor, and return its busiest loop."""
    import tvm
    from tvm.tirx.build import codegen_build

    from tvmify.compiler import pipeline
    from tvmify.compiler.codegen.lowering import lower
    from tvmify.system.workers import Workers
    from tvmify.target import Target

    attributes: dict[str, Any] = {"mtriple": "aarch64-unknown-linux-gnu", "mcpu": cpu}
    target = pipeline.tvm_target(Target("llvm", {**attributes, "mattr": ["+neon"]}))
    fused = pipeline.fuse(pipeline.lower(shape.sample().ir_mod(), target), target)
    scheduled, outcomes = pipeline.schedule(fused, target)
    loops: list[Loop] = []
    for variable, function in scheduled.functions_items():
        name = variable.name_hint
        if name not in outcomes or "pack" in name:
            continue
        ir_mod = tvm.IRModule({name: function.with_attr("global_symbol", name)})
        lowered, _ = lower(ir_mod, target, Workers(1))
        assembly = codegen_build(lowered, target).inspect_source("s")
        loops.append(busiest(assembly, str(outcomes[name])))
    return max(loops, key=lambda loop: loop.multiply_adds)


def cycles(loop: Loop, cpu: str, mca: str) -> float:
    """Return the cycles of one iteration."""
    options = ["-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", f"-iterations={_ITERATIONS}"]
    done = subprocess.run(
        [mca, *options, "-instruction-info=0", "-resource-pressure=0"],
        input=loop.text,
        capture_output=True,
        text=True,
        check=False,
    )
    total = re.search(r"^Total Cycles:\s+(\d+)", done.stdout, re.MULTILINE)
    if done.returncode or total is None:
        raise SystemExit(f"{mca} fails for {cpu}: {done.stderr.strip()}")
    return int(total[1]) / _ITERATIONS


def rows(only: str, mca: str, assembly: bool) -> Iterator[str]:
    """Measure the matching shapes, and yield the lines of a table."""
    yield "| processor | layer | rule | multiply-adds | cycles | units busy |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for cpu, units in UNITS.items():
        for text in fnmatch.filter(SHAPES, only):
            loop = loop_of(Shape.parse(text), cpu)
            taken = cycles(loop, cpu, mca)
            busy = loop.multiply_adds / (units * taken)
            cells = (cpu, text, loop.rule, loop.multiply_adds, f"{taken:.1f}", f"{busy:.0%}")
            yield f"| {' | '.join(map(str, cells))} |"
            if assembly:
                yield loop.text


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mca", default="llvm-mca-19", help="the llvm-mca program")
    parser.add_argument("--only", default="*", help="a pattern of layers")
    parser.add_argument("--assembly", action="store_true", help="print the loops as well")
    args = parser.parse_args()
    for line in rows(args.only, args.mca, args.assembly):
        print(line, flush=True)


if __name__ == "__main__":
    main()
