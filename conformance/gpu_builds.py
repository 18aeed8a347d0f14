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

from conformance.operators import DEFAULT_DTYPES, DTYPES, Applied, Case, operators
from tvmify.capture.exporting import export
from tvmify.compiler import compile
from tvmify.compiler.cuda import nvcc
from tvmify.errors import BuildError, NotCompiled, NothingToCompute
from tvmify.runtime import cpu_features
from tvmify.target import Target, target_for

BUILT, REFUSED, FAILED = "built", "refused", "failed"


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
    for case, outcome in builds(given.samples, only, given.dtypes.split(","), given.arch):
        kind = outcome.partition(":")[0]
        counts[kind] += 1
        if kind == FAILED:
            console.print(f"{case}: {outcome}", markup=False, highlight=False)
    console.print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    sys.exit(counts[FAILED] > 0)


def builds(
    samples: int, only: frozenset[str], dtypes: Collection[str], arch: str
) -> Iterator[tuple[Case, str]]:
    """Yield each sample with its outcome: one of three words, and the reason of a failure."""
    target = target_for({"kind": "cuda", "arch": arch}, "cpu", cpu_features())
    with mock.patch.object(nvcc, "compile", lambda *_: b""), torch.no_grad():
        for operator in track(operators(only, dtypes), disable=not sys.stderr.isatty()):
            if DTYPES[operator.dtype] not in operator.info.supported_dtypes("cuda"):
                continue
            for case, arguments in islice(operator.samples(), samples):
                yield case, build(Applied(operator.info.op, arguments), arguments, target)


def build(module: Applied, arguments: object, target: Target) -> str:
    """Capture and build one sample; return its outcome."""
    leaves = pytree.tree_leaves(arguments)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return REFUSED  # by the decorator, before capture
    try:
        report = compile(export(module.eval(), tensors, {}), target).report
    except BuildError as error:
        nothing = isinstance(error, NothingToCompute)
        return REFUSED if nothing else f"{FAILED}: {' '.join(error.reason.split())}"
    except NotCompiled:
        return REFUSED
    failures = [rule for rule in report["kernels"].values() if "failed" in rule]
    return f"{FAILED}: {failures[0]}" if failures else BUILT


if __name__ == "__main__":
    main()
