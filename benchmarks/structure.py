"""Compare scheduled functions with an earlier record, to show that a change affects none of them.

    python -m benchmarks.structure record FILE [--quick] [--only PATTERN]
    python -m benchmarks.structure compare BEFORE AFTER

A record has the structural hash and the rule of each scheduled function of ``shapes.txt`` and of
the benchmark's models, for AVX2, AVX-512 and NEON. No code is generated, and none of these
processors is needed. Hashes are equal in every process: they leave out names of variables, blocks
and functions. ``compare`` lists what differs, and fails if anything does.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.models import MODELS, build
from benchmarks.shapes import read

if TYPE_CHECKING:
    import tvm

#: By target, then by program: a line for each function, with its rule, hash and name.
Record = dict[str, dict[str, list[str]]]
#: Takes a target, and returns the lowered module to schedule for it.
Lowered = Callable[["tvm.target.Target"], "tvm.IRModule"]

_X86 = {"mtriple": "x86_64-unknown-linux-gnu", "mcpu": "x86-64"}
_AVX2 = ["+avx", "+avx2", "+fma", "+f16c"]
_AVX512 = ["+avx512f", "+avx512bw", "+avx512cd", "+avx512dq", "+avx512vl"]
#: Attributes of the targets.
TARGETS: dict[str, dict[str, Any]] = {
    "avx2": {**_X86, "mattr": _AVX2},
    "avx512": {**_X86, "mattr": _AVX2 + _AVX512},
    "neon": {"mtriple": "aarch64-unknown-linux-gnu", "mcpu": "generic", "mattr": ["+neon"]},
}
#: Small models that together have most kinds of layers, and every n-th of the shapes.
_QUICK_MODELS = ("resnet18", "minilm_16", "lstm", "dlrm")
_QUICK_STEP = 8


def record(programs: dict[str, Callable[[], Lowered]], stream: Any = sys.stderr) -> Record:
    """Schedule programs for each target.

    Parameters
    ----------
    programs
        By name; each is called once, and its result once for each target.
    stream
        Where progress is printed.
    """
    found: Record = {target: {} for target in TARGETS}
    for name, program in programs.items():
        begun = time.perf_counter()
        lowered = program()
        for target, attributes in TARGETS.items():
            found[target][name] = sorted(_functions(lowered, attributes))
        print(f"{time.perf_counter() - begun:6.1f} s  {name}", file=stream, flush=True)
    return found


def _functions(lowered: Lowered, attributes: dict[str, Any]) -> Iterator[str]:
    from tvmify.compiler import pipeline
    from tvmify.compiler.kernels.common.choice import Choices, choosing
    from tvmify.target import Target

    target = pipeline.tvm_target(Target("llvm", attributes))
    try:
        with choosing(Choices()):
            scheduled, outcomes = pipeline.schedule(lowered(target), target)
    except Exception as error:  # a target that a program cannot be built for is part of the record
        text = str(error).strip().splitlines() or [""]
        yield f"error: {type(error).__name__}: {text[-1]}"
        return
    for variable, function in scheduled.functions_items():
        name = variable.name_hint
        if name in outcomes:
            yield f"{outcomes[name]} {digest(function)} {name}"


def digest(function: tvm.tirx.PrimFunc) -> str:
    """Return a hash of a function's structure, the same in every process."""
    import tvm_ffi

    anonymous = function.without_attr("global_symbol")
    return f"{tvm_ffi.structural_hash(anonymous, map_free_vars=True) % (1 << 64):016x}"


def _of_shape(shape: Any) -> Lowered:
    from tvmify.compiler import pipeline

    return lambda target: pipeline.fuse(pipeline.lower(shape.sample().ir_mod(), target), target)


def _of_model(name: str) -> Lowered:
    import torch

    from tvmify.capture import capture
    from tvmify.compiler import pipeline
    from tvmify.compiler.frontend.decompositions import decompose
    from tvmify.compiler.frontend.importer import import_program

    module, args = build(name)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside torch and TVM
        program = decompose(capture(module, args, {}).export(args, {}))

    def lowered(target: tvm.target.Target) -> tvm.IRModule:
        with target, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            imported = import_program(program)
        return pipeline.fuse(pipeline.lower(imported.ir_mod, target), target)

    return lowered


def programs(quick: bool = False, only: str = "*") -> dict[str, Callable[[], Lowered]]:
    """Return the programs to record, by name: shapes and models."""
    found: dict[str, Callable[[], Lowered]] = {}
    for shape in list(read())[:: _QUICK_STEP if quick else 1]:
        found[str(shape)] = lambda shape=shape: _of_shape(shape)
    for name in _QUICK_MODELS if quick else MODELS:
        found[name] = lambda name=name: _of_model(name)
    return {name: program for name, program in found.items() if fnmatch.fnmatch(name, only)}


def differences(before: Record, after: Record) -> list[str]:
    """Return a line for each function that only one of two records has.

    Programs that one of them lacks are skipped, so that a quick record can be compared with a full
    one. Names of functions are not compared, since they depend on the functions before them.
    """
    lines = []
    for target in before.keys() & after.keys():
        for program in sorted(before[target].keys() & after[target].keys()):
            old, new = (
                {line: line.rpartition(" ")[0] or line for line in side[target][program]}
                for side in (before, after)
            )
            gone = Counter(old.values()) - Counter(new.values())
            come = Counter(new.values()) - Counter(old.values())
            for sign, side, counts in (("-", old, gone), ("+", new, come)):
                for line, compared in side.items():
                    if counts[compared] > 0:
                        counts[compared] -= 1
                        lines.append(f"{target} {program}: {sign} {line}")
    return sorted(lines)


def main() -> None:
    """Record, or compare two records."""
    parser = argparse.ArgumentParser(description="Structural hashes of all scheduled functions")
    steps = parser.add_subparsers(dest="step", required=True)
    recording = steps.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--quick", action="store_true", help="some shapes and four models")
    recording.add_argument("--only", default="*", help="programs whose name matches this pattern")
    comparing = steps.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.step == "record":
        from tvmify.compiler.environment import prepare_tvm

        prepare_tvm()
        found = record(programs(options.quick, options.only))
        options.file.parent.mkdir(parents=True, exist_ok=True)
        options.file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        return
    before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
    shared = {
        (target, program)
        for target in before.keys() & after.keys()
        for program in before[target].keys() & after[target].keys()
    }
    if not shared:
        sys.exit("the two records have no program in common")
    lines = differences(before, after)
    print(*lines, sep="\n" if lines else "")
    count = sum(len(after[target][program]) for target, program in shared)
    print(f"{len(shared)} programs with {count} functions: {len(lines)} lines differ")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
