"""The TVM side: an ATen program becomes Relax, scheduled TIR, and a shared library.

`compile` is the whole interface. TVM is imported when it is first called, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from tvmify.artifact import Artifact
from tvmify.errors import BuildError, NotCompiled
from tvmify.target import Target

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["compile"]


def compile(
    program: ExportedProgram, target: Target, on_stage: Callable[[str], object] = lambda name: None
) -> Artifact:
    """Compile an exported program into a shared library and its description.

    Parameters
    ----------
    program
        A ``torch.export.ExportedProgram``, not decomposed, with static shapes.
    target
        What to build for.
    on_stage
        Called with the name of each stage as it begins: ``"import"``, ``"lower"``,
        ``"schedule"``, ``"build"``, ``"link"``.

    Raises
    ------
    UnsupportedOperator
        The program holds operators, or effects, that the compiler does not know.
    UnsupportedInput
        A tensor of the program has a dtype or layout that compiled code cannot take.
    BuildError
        TVM failed; the message is the first line of its own, the cause the whole of it.
    """
    stages = _Stages(on_stage)
    try:
        with stages("import"):
            from tvmify.compiler.environment import prepare_tvm

            prepare_tvm()
            from tvmify.compiler.importer import import_program

            imported = import_program(program)
        with stages("lower"):
            from tvmify.compiler.build import generate, link
            from tvmify.compiler.packing import packed_keys
            from tvmify.compiler.pipeline import fuse, lower, plan_memory, tvm_target

            tvm_target_ = tvm_target(target)
            lowered = lower(imported.ir_mod, tvm_target_)
            packed = packed_keys(lowered, imported.weights)
            fused = fuse(lowered, tvm_target_)
        with stages("schedule"):
            from tvmify.compiler.schedule import schedule

            scheduled, kernels = schedule(fused, tvm_target_)
        with stages("build"):
            generated = generate(plan_memory(scheduled, tvm_target_), tvm_target_)
        with stages("link"):
            library = link(generated)
    except NotCompiled:
        raise
    except Exception as error:
        raise BuildError(
            f"TVM failed in the stage {stages.current!r}: {_first_line(error)}",
            "Run this module in eager PyTorch, and report the program: it was captured, so it "
            "should compile.",
        ) from error
    return Artifact(
        library=library,
        inputs=imported.inputs,
        weights=imported.weights if packed else (),
        packed=packed,
        outputs=imported.outputs,
        output_structure=imported.output_structure,
        report={
            "kernels": kernels,
            "unscheduled": sum(rule.startswith("unscheduled") for rule in kernels.values()),
            "operators": imported.operators,
            "seconds": stages.seconds,
        },
    )


class _Stages:
    """Announces each stage and measures it."""

    def __init__(self, on_stage: Callable[[str], object]) -> None:
        self.on_stage = on_stage
        self.current = ""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.current = name
        self.on_stage(name)
        start = perf_counter()
        yield
        self.seconds[name] = round(perf_counter() - start, 3)


def _first_line(error: Exception) -> str:
    """Return the line of TVM's message that a person can use: the last of its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("Traceback", "File ", "^"))]
    return (told[0] if told else type(error).__name__)[:300]
