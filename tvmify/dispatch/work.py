"""Loads a program from the disk cache, or builds it: exports what was captured, and compiles it.

The compiler runs in this process, or in another one for builds in the background.
"""

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
from tvmify.cache import DiskCache, Key, Measurements, TwoLevels
from tvmify.cache.directory import is_there
from tvmify.capture import Program, sizes_of
from tvmify.dispatch import building
from tvmify.dispatch.building import background
from tvmify.dispatch.building.allowance import allowance
from tvmify.dispatch.fit import misfit
from tvmify.dispatch.generality.hints import tuned_shapes
from tvmify.dispatch.generality.sizes import Specialized
from tvmify.dispatch.keys import is_tuned, key_for_any_torch, key_of, key_without_gpu, processor
from tvmify.dispatch.programs import Found, Source
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.proof import Prove
from tvmify.dispatch.request import Request
from tvmify.errors import CacheError
from tvmify.options import CompileOptions
from tvmify.runtime import Executor, casting, measure, measure_on
from tvmify.signature import Args
from tvmify.system.garbage import uncollected
from tvmify.target import Target

if TYPE_CHECKING:
    from torch.export import ExportedProgram


#: Hashes of libraries that failed to run: they are not loaded again from any cache.
rejected: set[int] = set()
#: Seconds to wait for another process that builds the same program, before building it here.
_LONGEST_WAIT = 300


@dataclass(frozen=True)
class Work:
    """A program that this process does not have.

    Attributes
    ----------
    key
        The key of the program.
    disk
        Where it is stored; None to keep it in memory only.
    request, program
        The program is exported for the arguments of the request, and built with its options.
    target
        Resolved for the device of the call.
    unpacked
        Names of weights that the program may not keep packed copies of.
    prove
        Tests a program that is built, before it is stored.
    """

    key: Key
    disk: DiskCache | TwoLevels | None
    request: Request
    program: Program
    target: Target
    unpacked: tuple[str, ...]
    prove: Prove

    def without_tensors(self) -> Work:
        """Return the same job without the caller's tensors, which a later build must not hold."""
        return replace(self, request=self.request.without_tensors())

    def load(self) -> Found | None:
        """Return the program from the disk cache, if it has one that fits the call."""
        if self.disk is None:
            return None
        # A program that was built without a GPU also serves; its verdicts get the key with the GPU.
        candidates = key_for_any_torch(self.key), self.key, key_without_gpu(self.key)
        for stored in dict.fromkeys(filter(None, candidates)):
            artifact = self.disk.load(stored)
            if artifact is None or (rejected and hash(artifact.library) in rejected):
                continue
            request = self.request
            problem = misfit(artifact, stored, self.program, request.args, request.kwargs)
            if not problem:
                try:
                    return self._found(Executor(artifact), Source.LOADED)
                except (RuntimeError, ValueError, TypeError) as error:
                    problem = str(error)
            self.disk.reject(stored, problem)
        return None

    def make(self, stages: Stages) -> Found:
        """Build and store the program while other processes wait, or load what they have built."""
        disk = self.disk
        if disk is None:
            return self._found(self._tried(self.build(stages), stages), Source.BUILT)
        with contextlib.ExitStack() as lock:
            for _ in range(_LONGEST_WAIT):
                stages.begin("wait")  # every second, so that a background build can be cancelled
                if lock.enter_context(disk.building(self.key.digest, timeout=1.0)):
                    break
            stages.begin("load")
            if (found := self.load()) is not None:
                return found  # another process has built it by now
            artifact = self.build(stages)
            found = self._found(self._tried(artifact, stages), Source.BUILT)
            stages.begin("store")
            disk.store(found.key, artifact)
            rejected.discard(hash(artifact.library))
        return found

    def _tried(self, artifact: Artifact, stages: Stages) -> Executor:
        stages.begin("try")
        executor = Executor(artifact)
        self.prove(executor)
        return executor

    def _found(self, executor: Executor, source: Source) -> Found:
        return Found(key_of(self.key, executor.artifact), executor, source)

    def export(self, stages: Stages) -> ExportedProgram:
        """Return the captured program as ``torch.export`` records it."""
        stages.begin("export")
        request = self.request
        return self.program.export(request.args, request.kwargs, request.varying)

    def build(self, stages: Stages) -> Artifact:
        """Export and compile the program."""
        options, target = self.request.options, self.target
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
            if builder and not is_tuned(self.key) and building.can_cross(target):
                stages.begin("build")
                artifact = builder.build(exported, target, settings)
                if artifact is not None:
                    return artifact
            tuning = None
            if is_tuned(self.key):
                database = Measurements(options.cache_directory(), processor(self.key))
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
