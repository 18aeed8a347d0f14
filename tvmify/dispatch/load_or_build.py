"""Gets a program from this process, from the disk cache, or from the compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from tvmify.artifact import Artifact
from tvmify.artifact.settings import BuildSettings
from tvmify.artifact.shapes import Shapes
from tvmify.cache import DiskCache, Key, Measurements, TwoLevels, disk_at, remote_at
from tvmify.cache.directory import is_there
from tvmify.capture import Program
from tvmify.dispatch import building, keys, on_miss
from tvmify.dispatch.building import background
from tvmify.dispatch.building.allowance import allowance
from tvmify.dispatch.fit import misfit
from tvmify.dispatch.generality.hints import numbers, tuned
from tvmify.dispatch.generality.sizes import Specialized
from tvmify.dispatch.generality.symbols import sizes_of
from tvmify.dispatch.keys import key_for_any_torch, key_of, key_without_gpu, processor
from tvmify.dispatch.programs import Found, Source
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.proof import Prove, loads
from tvmify.dispatch.request import Request
from tvmify.errors import CacheError
from tvmify.options import CompileOptions
from tvmify.runtime import Executor, casting, measure, measure_on
from tvmify.system import forks, variables
from tvmify.system.garbage import uncollected
from tvmify.target import Target

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Disk = DiskCache | TwoLevels

_LOG = logging.getLogger(__name__)

# Executors by the digest of their key: instances that differ only in weights share the code.
_LOADED: weakref.WeakValueDictionary[str, Executor] = weakref.WeakValueDictionary()
# Held while a program is built, so that a process builds each once. Not held while one is loaded,
# or loads would wait for builds.
_BUILDING = forks.Lock()
# Hashes of libraries that failed to run: they are not loaded again from any cache.
_REJECTED: set[int] = set()
#: Seconds to wait for another process that builds the same program, before building it here.
_LONGEST_WAIT = 300


@dataclass(frozen=True)
class Wanted:
    """A captured program for a request, before its compiled code is looked up.

    Attributes
    ----------
    request
        The call.
    program, fingerprint
        The captured program, and its text in the key.
    target
        Resolved for the device of the call.
    weights
        The tensors of the module that the program reads, by name.
    volatile
        Names of weights that calls write to, so the program may not keep packed copies of them.
    """

    request: Request
    program: Program
    fingerprint: str
    target: Target
    weights: Mapping[str, torch.Tensor]
    volatile: Collection[str]

    def key(self, unpacked: Sequence[str]) -> Key:
        """Return the key of the program; see `tvmify.dispatch.keys.key`."""
        request = self.request
        return keys.key(
            self.fingerprint,
            request.signature,
            self.weights,
            self.target,
            request.options,
            unpacked,
            sizes=request.varying.key_text() if request.varying.axes else "",
        )


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


def obtain(wanted: Wanted, stages: Stages, prove: Prove) -> Found:
    """Return a program from this process, the disk cache, or the compiler.

    Parameters
    ----------
    wanted
        If no cache has it, it is built, and stored in the disk cache.
    stages
        Notified of each stage.
    prove
        Tests a program that is built now, before it is stored. One that is built in the background
        is only loaded.

    Raises
    ------
    CacheMiss
        No cache has it, and it is not built now.
    NotCompiled
        The program cannot be exported or built.
    """
    options = wanted.request.options
    unpacked: tuple[str, ...] = ()
    while True:
        work = Work(wanted.key(unpacked), wanted.request, wanted.program, unpacked)
        key, disk = work.key, _disk(options)
        _log_key(key, stages)
        stages.begin("load")
        found = _shared(key) or on_miss.finished(key) or _load(key, disk, partial(_find, work))
        if found is None:
            # A later build must not keep the arguments of this call alive.
            work = dataclasses.replace(work, request=wanted.request.without_tensors())
            proof = prove if on_miss.builds_now(options) else loads
            make, export = partial(_make, work, disk, proof), partial(_export, work, stages)
            with _BUILDING:  # another thread may have built it by now
                found = _shared(key) or on_miss.resolve(key, make, export, options, stages)
                _LOADED.setdefault(found.key.digest, found.executor)  # for the next thread
        digest = found.key.digest
        if found.key != key:
            _LOG.debug("%s: key %s, for any version of PyTorch", stages.subject, digest)
        if found.source is not Source.SHARED:
            _LOADED[digest] = found.executor
        stale = tuple(n for n in found.executor.artifact.weights if n in wanted.volatile)
        if not stale:
            return found
        unpacked = stale


def _log_key(key: Key, stages: Stages) -> None:
    if _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("%s: key %s", stages.subject, key.digest)
        for name, digest in key.hashes().items():
            _LOG.debug("%s: key entry %r has hash %s", stages.subject, name, digest)


def _shared(key: Key) -> Found | None:
    for place in (key_for_any_torch(key), key):
        if (loaded := _LOADED.get(place.digest)) is not None:
            return Found(place, loaded.share(), Source.SHARED)
    return None


def load_again(key: Key, artifact: Artifact) -> Executor:
    """Return an executor without weights for an artifact that had one before."""
    if (shared := _shared(key)) is not None:
        return shared.executor
    return _LOADED.setdefault(key.digest, Executor(artifact))


def keep(key: Key, artifact: Artifact, options: CompileOptions) -> None:
    """Store an artifact whose verdicts have changed in the disk cache, if there is one."""
    disk = _disk(options)
    if disk is not None:
        disk.store(key, artifact)


def reject(key: Key, artifact: Artifact, problem: Exception, options: CompileOptions) -> None:
    """Discard a program that was loaded from disk and failed to run.

    Raises
    ------
    torch.OutOfMemoryError, torch.AcceleratorError
        The GPU is full, or has failed, so the program is not at fault.
    """
    if isinstance(problem, (torch.OutOfMemoryError, torch.AcceleratorError)):
        raise problem
    _LOADED.pop(key.digest, None)
    _REJECTED.add(hash(artifact.library))
    disk = _disk(options)
    if disk is not None:
        disk.reject(key, str(problem))


def build_once(
    key: Key,
    disk: Disk | None,
    find: Callable[[Disk], Executor | None],
    build: Callable[[], Artifact],
    stages: Stages,
    prove: Prove = lambda executor: None,
) -> Found:
    """Build and store a program while other processes wait, or load what they have built."""
    if disk is None:
        return _found(key, _proven(build(), prove, stages), Source.BUILT)
    with contextlib.ExitStack() as lock:
        for _ in range(_LONGEST_WAIT):
            stages.begin("wait")  # every second, so that a background build can be cancelled
            if lock.enter_context(disk.building(key.digest, timeout=1.0)):
                break
        stages.begin("load")
        # another process may have built it by now
        if (found := _load(key, disk, find)) is not None:
            return found
        artifact = build()
        executor = _proven(artifact, prove, stages)
        found = _found(key, executor, Source.BUILT)
        stages.begin("store")
        disk.store(found.key, artifact)
        _REJECTED.discard(hash(artifact.library))
    return found


def _found(key: Key, executor: Executor, source: Source) -> Found:
    return Found(key_of(key, executor.artifact), executor, source)


def _proven(artifact: Artifact, prove: Prove, stages: Stages) -> Executor:
    stages.begin("try")
    executor = Executor(artifact)
    prove(executor)
    return executor


def _load(key: Key, disk: Disk | None, find: Callable[[Disk], Executor | None]) -> Found | None:
    executor = find(disk) if disk is not None else None
    return None if executor is None else _found(key, executor, Source.LOADED)


def _make(work: Work, disk: Disk | None, prove: Prove, stages: Stages) -> Found:
    """Build a program for `on_miss.resolve`, now or later."""
    find, build = partial(_find, work), partial(_build, work, stages)
    return build_once(work.key, disk, find, build, stages, prove)


def _find(work: Work, disk: Disk) -> Executor | None:
    # A program that was built without a GPU also serves; its verdicts get the key with the GPU.
    places = key_for_any_torch(work.key), work.key, key_without_gpu(work.key)
    for place in dict.fromkeys(filter(None, places)):
        artifact = disk.load(place)
        if artifact is None or (_REJECTED and hash(artifact.library) in _REJECTED):
            continue
        request = work.request
        problem = misfit(artifact, place, work.program, request.args, request.kwargs)
        if not problem:
            try:
                return Executor(artifact)
            except (RuntimeError, ValueError, TypeError) as error:
                problem = str(error)
        disk.reject(place, problem)
    return None


def _disk(options: CompileOptions) -> Disk | None:
    directory, url = options.cache_directory(), options.cache_url()
    if directory is None:
        return None
    near = disk_at(directory, variables.cache_limits())
    return near if url is None else TwoLevels(near, remote_at(url))


def _export(work: Work, stages: Stages) -> ExportedProgram:
    stages.begin("export")
    request = work.request
    return work.program.export(request.args, request.kwargs, request.varying)


def _build(work: Work, stages: Stages) -> Artifact:
    key, options = work.key, work.request.options
    # Imported here, since a warm process must not load TVM's compiler.
    from tvmify.compiler import Tuning, compile

    with contextlib.ExitStack() as around:
        if stages.threads is None:  # no call waits for a background build
            around.enter_context(uncollected())
        builder = background.builder_here()
        with allowance.spend(at_once=False) if builder else contextlib.nullcontext():
            exported = _export(work, stages)
            shapes = _shapes(work, exported)
        settings = BuildSettings(
            options.accuracy, work.unpacked, shapes, _scratch_directories(options)
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
            stopwatch = _stopwatch(target, work.request.args, work.request.kwargs)
            tuning = Tuning(stopwatch, database, stages.advance)
        # The program contains the casts of autocast, so calls of the compiler must not add any.
        around.enter_context(casting({}))
        return compile(
            exported, target, settings, stages.begin, tuning=tuning, threads=stages.threads
        )


def _shapes(work: Work, exported: ExportedProgram) -> Shapes | None:
    """Return the shapes that an exported program serves, as far as its recording shows.

    Raises
    ------
    Specialized
        It has no symbolic size.
    """
    varying = work.request.varying
    if not varying.axes:
        return None
    from tvmify.artifact.recorded_shapes import recorded_shapes

    shapes = recorded_shapes(exported, varying.hints_by_axis())
    if shapes is None:
        raise Specialized
    fixed = numbers(varying, shapes)
    if fixed.isdisjoint(varying.hints):
        return shapes
    # Classes are for the sizes that are still symbols.
    varying = tuned(varying, sizes_of(work.request.leaves), fixed)
    return recorded_shapes(exported, varying.hints_by_axis())


def _scratch_directories(options: CompileOptions) -> tuple[Path, ...]:
    """Return another folder for temporary files: the cache, which is private."""
    directory = options.cache_directory()
    with contextlib.suppress(CacheError):
        if directory is not None and is_there(directory):
            return (directory,)
    return ()


def _stopwatch(target: Target, args: Any, kwargs: Any) -> Callable[..., list[float]]:
    if target.kind != "cuda":
        return measure
    leaves = pytree.tree_leaves((args, kwargs))
    gpus = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
    return partial(measure_on, gpus[0] if gpus else torch.device("cuda"))
