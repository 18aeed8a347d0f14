"""Builds a program: exports what was captured, and compiles it here or in another process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from tvmify.artifact import Artifact
from tvmify.artifact.settings import BuildSettings
from tvmify.artifact.shapes import Shapes
from tvmify.cache import Key, Measurements
from tvmify.cache.directory import is_there
from tvmify.capture import Program, sizes_of
from tvmify.dispatch import building
from tvmify.dispatch.building import background
from tvmify.dispatch.building.allowance import allowance
from tvmify.dispatch.generality.hints import tuned_shapes
from tvmify.dispatch.generality.sizes import Specialized
from tvmify.dispatch.keys import processor
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.request import Request
from tvmify.errors import CacheError
from tvmify.options import CompileOptions
from tvmify.runtime import casting, measure, measure_on
from tvmify.signature import Args
from tvmify.system.garbage import uncollected
from tvmify.target import Target

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True)
class Work:
    """A build job.

    Attributes
    ----------
    key
        The key of the result.
    request, program
        The program is exported for the arguments of the request, and built with its options.
    unpacked
        Names of weights that the program may not keep packed copies of.
    """

    key: Key
    request: Request
    program: Program
    unpacked: tuple[str, ...]

    def without_tensors(self) -> Work:
        """Return the same job without the caller's tensors, which a later build must not hold."""
        return replace(self, request=self.request.without_tensors())

    def export(self, stages: Stages) -> ExportedProgram:
        """Return the captured program as ``torch.export`` records it."""
        stages.begin("export")
        request = self.request
        return self.program.export(request.args, request.kwargs, request.varying)

    def build(self, stages: Stages) -> Artifact:
        """Export and compile the program."""
        key, options = self.key, self.request.options
        # Imported here, since a warm process must not load TVM's compiler.
        from tvmify.compiler import Tuning, compile

        with contextlib.ExitStack() as around:
            if stages.threads is None:  # no call waits for a background build
                around.enter_context(uncollected())
            builder = background.builder_here()
            with allowance.spend(at_once=False) if builder else contextlib.nullcontext():
                exported = self.export(stages)
                shapes = self._shapes(exported)
            settings = BuildSettings(
                options.accuracy, self.unpacked, shapes, _scratch_directories(options)
            )
            target = Target.parse(key.entries["target"])
            if builder and not key.entries["tuned for"] and building.can_cross(target):
                stages.begin("build")
                artifact = builder.build(exported, target, settings)
                if artifact is not None:
                    return artifact
            tuning = None
            if key.entries["tuned for"]:  # kernels for a GPU elsewhere cannot be timed
                database = Measurements(options.cache_directory(), processor(key))
                tuning = Tuning(_stopwatch(target, self.request.leaves), database, stages.advance)
            # The program contains the casts of autocast, so calls of the compiler must not add any.
            around.enter_context(casting({}))
            return compile(
                exported, target, settings, stages.begin, tuning=tuning, threads=stages.threads
            )

    def _shapes(self, exported: ExportedProgram) -> Shapes | None:
        """Return the shapes that an exported program serves, as far as its recording shows.

        Raises
        ------
        Specialized
            It has no symbolic size.
        """
        varying = self.request.varying
        if not varying.axes:
            return None
        leaves = pytree.tree_leaves((self.request.args, self.request.kwargs))
        shapes = tuned_shapes(exported, varying, sizes_of(leaves))
        if shapes is None:
            raise Specialized
        return shapes


def _stopwatch(target: Target, leaves: Args) -> Callable[..., list[float]]:
    if target.kind != "cuda":
        return measure
    gpus = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
    return partial(measure_on, gpus[0] if gpus else torch.device("cuda"))


def _scratch_directories(options: CompileOptions) -> tuple[Path, ...]:
    """Return another folder for temporary files: the cache, which is private."""
    directory = options.cache_directory()
    with contextlib.suppress(CacheError):
        if directory is not None and is_there(directory):
            return (directory,)
    return ()
