"""The TVM side: an ATen program becomes Relax, scheduled TIR, and a shared library.

`compile` is the whole interface. TVM is imported when it is first called, not before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tvmify.artifact import Artifact
from tvmify.artifact.recorded_shapes import with_later_guards
from tvmify.artifact.settings import BuildSettings
from tvmify.artifact.shapes import Shapes
from tvmify.artifact.stages import Stage
from tvmify.compiler.environment import load_ahead, prepare_tvm
from tvmify.compiler.messages import first_line
from tvmify.compiler.tune.tuning import Tuning
from tvmify.compiler.tune.tuning import tune as tune_kernels
from tvmify.errors import BuildError, NotCompiled, UnsupportedOperator
from tvmify.system import forks
from tvmify.system.faults import environment_fault
from tvmify.target import Target
from tvmify.torch_compat.silence import silenced
from tvmify.torch_compat.tracing import tracing

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule

    from tvmify.compiler.frontend.decompositions import Decomposed

__all__ = ["Tuning", "compile"]

_DEFAULT = BuildSettings()
#: TVM has one stack of block builders for all threads.
_ONE_AT_A_TIME = forks.Lock()
#: Decomposed recordings with symbols, for as long as the recordings are kept.
_DECOMPOSED: WeakKeyDictionary[GraphModule, Decomposed] = WeakKeyDictionary()


def compile(
    program: ExportedProgram,
    target: Target,
    settings: BuildSettings = _DEFAULT,
    on_stage: Callable[[Stage], object] = lambda name: None,
    *,
    tuning: Tuning | None = None,
    threads: int | None = None,
) -> Artifact:
    """Compile an exported program into a shared library and its description.

    Parameters
    ----------
    program
        A ``torch.export.ExportedProgram``, not decomposed.
    target
        What to build for.
    settings
        What else affects the code.
    on_stage
        Called with the name of each stage from ``"decompose"`` to ``"release"`` when it begins.
    tuning
        How to time candidates for kernels; None leaves the choice to the rules.
    threads
        How many threads LLVM may use; None for one per processor.

    Raises
    ------
    UnsupportedOperator
        The program has operators or side effects that the compiler does not know.
    UnsupportedInput
        A tensor of the program has a dtype or layout that compiled code cannot hold.
    BuildError
        TVM failed (the message has the first line of TVM's error, which is the cause), or disk
        space, memory or permissions did not suffice.
    """
    stages = _Stages(on_stage)
    # Deprecations inside torch and TVM do not concern the user, and must not fail under -W error.
    with _ONE_AT_A_TIME, silenced():
        try:
            decomposed = _decompose(program, stages, is_kept=settings.shapes is not None)
            if settings.shapes is not None:
                tuning = None  # it is for one size
                narrowed = with_later_guards(settings.shapes, decomposed.program)
                settings = dataclasses.replace(settings, shapes=narrowed)
            with _known_sizes(settings.shapes):
                return _compile(decomposed, target, settings, stages, tuning, threads)
        except NotCompiled:
            raise
        except Exception as error:
            if fault := environment_fault(error, f"the stage {stages.current!r} of a build"):
                raise fault from error
            raise BuildError(
                f"TVM failed in the stage {stages.current!r}: {first_line(error)}",
                "Run this module in eager PyTorch, and report the program: it was captured, so it "
                "should compile.",
            ) from error


def _decompose(program: ExportedProgram, stages: _Stages, *, is_kept: bool) -> Decomposed:
    # Imported here: this takes seconds, and a warm process must not load the compiler.
    with stages("decompose"):
        from tvmify.compiler.frontend.decompositions import decompose
        from tvmify.torch_compat.bystanders import unseen_by_others

        # A recording with symbols is built once for each size class.
        if (decomposed := _DECOMPOSED.get(program.graph_module)) is None:
            load_ahead()
            with tracing(), unseen_by_others():
                decomposed = decompose(program)
            if is_kept:
                _DECOMPOSED[program.graph_module] = decomposed
        prepare_tvm()
    return decomposed.copy() if is_kept else decomposed


def _known_sizes(shapes: Shapes | None) -> AbstractContextManager[None]:
    """Tell the compiler about the symbols among the sizes."""
    from tvmify.compiler.sizes import Range, symbols

    if shapes is None:
        return symbols({})
    pairs = zip(shapes.symbols, shapes.hints, strict=True)
    return symbols(
        {s.name: Range(hint, s.lower, s.upper, shapes.factor(s.name)) for s, hint in pairs}
    )


def _compile(
    decomposed: Decomposed,
    target: Target,
    settings: BuildSettings,
    stages: _Stages,
    tuning: Tuning | None,
    threads: int | None,
) -> Artifact:
    shapes = settings.shapes
    with stages("import"):
        from tvmify.compiler import pipeline
        from tvmify.compiler.codegen import build
        from tvmify.compiler.codegen.packing import packed_keys
        from tvmify.compiler.frontend.importer import import_program
        from tvmify.compiler.kernels.common import choice
        from tvmify.compiler.kernels.matmul.call_libraries import called

        tvm_target = pipeline.tvm_target(target)
        choices = choice.Choices(settings.accuracy)
        with tvm_target, choice.choosing(choices):
            imported = import_program(decomposed, settings.unpacked)
        if shapes is not None:
            shapes = with_later_guards(shapes, decomposed.program)
    report: dict[str, object] = {}
    if tuning is not None:
        with stages("tune"):
            tuned = tune_kernels(imported.ir_mod, tvm_target, choices, tuning)
            choices = dataclasses.replace(choices, measured=tuned.winners)
            report["tuning"] = tuned.report()
    with stages("lower"), choice.choosing(choices):
        lowered = pipeline.lower(imported.ir_mod, tvm_target)
        packed = packed_keys(lowered, imported.weights)
        fused = pipeline.fuse(lowered, tvm_target)
    with stages("schedule"), choice.choosing(choices):
        scheduled, kernels = pipeline.schedule(fused, tvm_target)
        unscheduled = [name for name, outcome in kernels.items() if outcome.rule is None]
        if shapes is not None and unscheduled:
            raise UnsupportedOperator(unscheduled, "no rule schedules it for symbolic sizes")
    with stages("build"):
        planned = pipeline.plan_memory(scheduled, tvm_target)
        generated = build.generate(planned, tvm_target, threads=threads)
    with stages("link"):
        library = build.link(generated, settings.scratch_directories)
    # The objects of this function are freed when it returns, which takes longer than linking.
    stages.on_stage("release")
    report |= {
        "kernels": {name: str(outcome) for name, outcome in kernels.items()},
        "unscheduled": len(unscheduled),
        "operators": imported.operators,
        "bridged": imported.bridged,
        "libraries": called(lowered),
        "seconds": stages.seconds,
    }
    return Artifact(
        library=library,
        target=str(target),
        inputs=imported.inputs,
        state=imported.state,
        weights=imported.weights if packed else (),
        packed=packed,
        writes=imported.writes,
        outputs=imported.outputs,
        complex=imported.complex,
        needs_contiguous=imported.needs_contiguous,
        draws=imported.draws,
        shapes=shapes,
        output_structure=imported.output_structure,
        report=report,
    )


class _Stages:
    """Announces and times each stage."""

    def __init__(self, on_stage: Callable[[Stage], object]) -> None:
        self.on_stage = on_stage
        self.current: Stage | None = None
        self.seconds: dict[Stage, float] = {}

    @contextmanager
    def __call__(self, name: Stage) -> Iterator[None]:
        self.current = name
        self.on_stage(name)
        start = perf_counter()
        yield
        self.seconds[name] = round(perf_counter() - start, 3)
