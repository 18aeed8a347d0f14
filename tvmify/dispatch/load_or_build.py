"""Gets a program from this process, from the disk cache, or from the compiler."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tvmify.artifact import Artifact
from tvmify.cache import DiskCache, Key, TwoLevels, disk_at, remote_at
from tvmify.capture import Program
from tvmify.dispatch import keys, on_miss
from tvmify.dispatch.fit import misfit
from tvmify.dispatch.keys import key_for_any_torch, key_of, key_without_gpu
from tvmify.dispatch.programs import Found, Source
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.proof import Prove, loads
from tvmify.dispatch.request import Request
from tvmify.dispatch.work import Work
from tvmify.options import CompileOptions
from tvmify.runtime import Executor
from tvmify.system import forks, variables
from tvmify.target import Target

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
        find = partial(_find, work)
        found = _shared(key) or on_miss.finished(key) or _load(key, disk, find)
        if found is None:
            work = work.without_tensors()
            make = partial(
                build_once,
                key,
                disk,
                partial(_find, work),
                work.build,
                prove=prove if on_miss.builds_now(options) else loads,
            )
            export = partial(work.export, stages)
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
    for stored in (key_for_any_torch(key), key):
        if (loaded := _LOADED.get(stored.digest)) is not None:
            return Found(stored, loaded.share(), Source.SHARED)
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
    build: Callable[[Stages], Artifact],
    stages: Stages,
    prove: Prove = lambda executor: None,
) -> Found:
    """Build and store a program while other processes wait, or load what they have built.

    Parameters
    ----------
    key
        The key of the program.
    disk
        Where it is stored; None to keep it in memory only.
    find
        Returns the program if the disk has one that fits.
    build
        Builds it otherwise.
    stages
        Notified of each stage.
    prove
        Tests a program before it is stored.
    """
    if disk is None:
        return _found(key, _proven(build(stages), prove, stages), Source.BUILT)
    with contextlib.ExitStack() as lock:
        for _ in range(_LONGEST_WAIT):
            stages.begin("wait")  # every second, so that a background build can be cancelled
            if lock.enter_context(disk.building(key.digest, timeout=1.0)):
                break
        stages.begin("load")
        # another process may have built it by now
        if (found := _load(key, disk, find)) is not None:
            return found
        artifact = build(stages)
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


def _find(work: Work, disk: Disk) -> Executor | None:
    # A program that was built without a GPU also serves; its verdicts get the key with the GPU.
    candidates = key_for_any_torch(work.key), work.key, key_without_gpu(work.key)
    for stored in dict.fromkeys(filter(None, candidates)):
        artifact = disk.load(stored)
        if artifact is None or (_REJECTED and hash(artifact.library) in _REJECTED):
            continue
        request = work.request
        problem = misfit(artifact, stored, work.program, request.args, request.kwargs)
        if not problem:
            try:
                return Executor(artifact)
            except (RuntimeError, ValueError, TypeError) as error:
                problem = str(error)
        disk.reject(stored, problem)
    return None


def _disk(options: CompileOptions) -> Disk | None:
    directory, url = options.cache_directory(), options.cache_url()
    if directory is None:
        return None
    near = disk_at(directory, variables.cache_limits())
    return near if url is None else TwoLevels(near, remote_at(url))
