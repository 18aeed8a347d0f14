"""PyTorch's operator samples, built for a GPU without one.

    python -m conformance.gpu_builds [--samples 2] [--only add,mul] [--dtypes float32,int64]
                                     [--arch sm_80]

Nothing runs here: CUDA C++ is generated, and not compiled, so neither a GPU nor nvcc is needed. A
sample that is captured has to become a program, or be refused by name.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import islice
from unittest import mock

import torch
from rich.console import Console
from rich.progress import track
from torch.utils import _pytree as pytree

from conformance.operators import (
    COMPILED,
    CRASHED,
    DEFAULT_DTYPES,
    DTYPES,
    EAGER,
    Applied,
    Case,
    Result,
    operators,
)
from tvmify.capture.exporting import export
from tvmify.compiler import compile
from tvmify.compiler.cuda import nvcc
from tvmify.errors import BuildError, NotCompiled, NothingToCompute
from tvmify.runtime import cpu_features
from tvmify.target import Target, target_for


def main() -> None:
    """Build the samples, and print those that fail."""
    parser = argparse.ArgumentParser(description="PyTorch's operator samples, built for a GPU.")
    parser.add_argument("--samples", type=int, default=2, help="samples per operator")
    parser.add_argument("--only", default="", help="names of operators, separated by commas")
    parser.add_argument("--dtypes", default=",".join(DEFAULT_DTYPES))
    parser.add_argument("--arch", default="sm_80")
    given = parser.parse_args()
    console, counts = Console(soft_wrap=True), Counter[str]()
    only = frozenset(given.only.split(",")) - {""}
    for case, result in builds(given.samples, only, given.dtypes.split(","), given.arch):
        counts[result.outcome] += 1
        if result.outcome == CRASHED:
            console.print(f"{case}: {result.reason}", markup=False, highlight=False)
    console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    sys.exit(counts[CRASHED] > 0)


def builds(
    samples: int, only: frozenset[str], dtypes: Collection[str], arch: str
) -> Iterator[tuple[Case, Result]]:
    """Yield each sample with its result: compiled, in eager, or crashed if a build failed."""
    target = target_for({"kind": "cuda", "arch": arch}, "cpu", cpu_features())
    with mock.patch.object(nvcc, "compile", lambda *_: b""), torch.no_grad():
        for operator in track(operators(only, dtypes), disable=not sys.stderr.isatty()):
            if DTYPES[operator.dtype] not in operator.info.supported_dtypes("cuda"):
                continue
            for case, arguments in islice(operator.samples(), samples):
                yield case, build(Applied(operator.info.op, arguments), arguments, target)


def build(module: Applied, arguments: object, target: Target) -> Result:
    """Capture and build one sample."""
    leaves = pytree.tree_leaves(arguments)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return Result(EAGER)  # the decorator refuses it before capture
    try:
        report = compile(export(module.eval(), tensors, {}), target).report
    except NothingToCompute:
        return Result(EAGER)
    except BuildError as error:
        return Result(CRASHED, reason=error.reason)
    except NotCompiled:
        return Result(EAGER)
    failures = [rule for rule in report["kernels"].values() if "failed" in rule]
    return Result(CRASHED, reason=failures[0]) if failures else Result(COMPILED)


if __name__ == "__main__":
    main()
