"""Compile for a GPU without one: to a cubin, or so that the CPU can run the program."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compiler.programs import as_module, executed, recorded, target
from tests.tolerances import assert_close_to_reference
from tvmify.artifact import Artifact
from tvmify.compiler import Tuning, compile
from tvmify.compiler.cuda import nvcc
from tvmify.runtime import cpu_features
from tvmify.target import Target, target_for
from tvmify.torch_compat.silence import silenced

needs_nvcc = pytest.mark.skipif(nvcc.find() is None, reason="there is no nvcc here")

#: The magic number of a fatbin, and its numbers for the forms of code.
_FATBIN = b"\x50\xed\x55\xba\x01\0"
_FORMS = {1: "ptx", 2: "elf"}


class _Prefers:
    """A database in which one form is the faster one for all products."""

    def __init__(self, form: str) -> None:
        self.form = form

    def best(self, workload: str, candidates: Sequence[str]) -> str:
        assert sorted(candidates) == ["kernel", "library"]
        return self.form

    def record(self, workload: str, seconds: Mapping[str, float]) -> None:
        pytest.fail("measured what is known")


class Kernels(dict[str, str]):
    """Fake measurements by which kernels are faster for any product."""

    def get(self, workload: str, default: Any = None) -> str:
        return "kernel"


def _measures(*_: Any) -> list[float]:
    pytest.fail("measured what is known")


ALWAYS_A_KERNEL = Tuning(_measures, _Prefers("kernel"))


def gpu(arch: str = "sm_80") -> Target:
    """A GPU of this architecture."""
    return target_for({"kind": "cuda", "arch": arch}, "cpu", cpu_features())


def exported(program: Callable[..., Any], *args: Any) -> torch.export.ExportedProgram:
    return recorded(as_module(program), args)


def cross_built(program: Callable[..., Any], *args: Any, arch: str = "sm_80") -> Artifact:
    """Compile a module or function for a GPU, and check that it has one fatbin for it."""
    artifact = compile(recorded(as_module(program), args), gpu(arch))
    generation = int(arch.strip("sm_af"))
    assert sorted(code_of(artifact.library)) == [("elf", generation), ("ptx", generation)]
    assert b"__global__" not in artifact.library
    assert artifact.report["unscheduled"] == 0
    return artifact


def code_of(library: bytes) -> list[tuple[str, int]]:
    """The form and the architecture of all code in the fatbins of a library.

    A fatbin has a magic number, version and size, then entries of a header and code.
    """
    found = []
    at = library.find(_FATBIN)
    while at >= 0:
        head, size = struct.unpack_from("<HQ", library, at + 6)
        entry, end = at + head, at + head + size
        while entry < end:
            kind, head, size = struct.unpack_from("<H2xIQ", library, entry)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            found.append((_FORMS[kind], architecture))
            entry += head + size
        at = library.find(_FATBIN, end)
    return found


def kernels_on_cpu(source: str, folder: Path) -> Path:
    """Compile CUDA C++ for this CPU; the library has a ``launch_…`` for each kernel."""
    source = source[source.index('extern "C" __global__') :]
    launches = "".join(
        f'extern "C" void launch_{name}(void** values, const int64_t* sizes)'
        f" {{ emulated::launch<{name}>(values, sizes); }}\n"
        for name in sorted(set(re.findall(r"(\w+_kernel)\(", source)))
    )
    number = len(list(folder.iterdir()))  # a path that was loaded once is not loaded again
    written, built = folder / f"kernels{number}.cpp", folder / f"kernels{number}.so"
    header = Path(__file__).parent / "cuda_on_cpu.h"
    written.write_text(f'#include "{header}"\n{source}\n{launches}')
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    subprocess.run(["g++", *options, "-o", str(built), str(written)], check=True)
    return built


def on_cpu(program: Callable[..., Any], *args: Any) -> Artifact:
    """Compile for a GPU, but schedule and build for this CPU, with the same calls of ATen."""
    from tvmify.compiler.environment import prepare_tvm

    prepare_tvm()
    from tvmify.compiler import pipeline
    from tvmify.compiler.codegen import build
    from tvmify.compiler.codegen.packing import packed_keys
    from tvmify.compiler.frontend.decompositions import decompose
    from tvmify.compiler.frontend.importer import import_program

    for_gpu, for_cpu = pipeline.tvm_target(gpu()), pipeline.tvm_target(target())
    with for_gpu, silenced():
        imported = import_program(decompose(exported(program, *args)))
    lowered = pipeline.lower(imported.ir_mod, for_gpu)
    packed = packed_keys(lowered, imported.weights)
    scheduled, outcomes = pipeline.schedule(pipeline.fuse(lowered, for_gpu), for_cpu)
    generated = build.generate(pipeline.plan_memory(scheduled, for_cpu), for_cpu)
    return Artifact(
        library=build.link(generated),
        target=str(target()),
        inputs=imported.inputs,
        state=imported.state,
        weights=imported.weights if packed else (),
        packed=packed,
        writes=imported.writes,
        outputs=imported.outputs,
        output_structure=imported.output_structure,
        complex=imported.complex,
        needs_contiguous=imported.needs_contiguous,
        report={
            "kernels": {name: str(outcome) for name, outcome in outcomes.items()},
            "bridged": imported.bridged,
        },
    )


def check(program: Callable[..., Any], *args: Any) -> Artifact:
    """Run `on_cpu`, and compare with eager and float64."""
    artifact = on_cpu(program, *args)
    with torch.no_grad():
        result = executed(artifact, program, *args)
    assert_close_to_reference(result, as_module(program), args)
    return artifact
