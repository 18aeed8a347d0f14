"""Gets a program from this process, from the disk cache, or from the compiler."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from tvmify.artifact import Artifact
from tvmify.cache import DiskCache, Key, TwoLevels, disk_at, remote_at
from tvmify.capture import Program
from tvmify.dispatch import keys, on_miss
from tvmify.dispatch.keys import key_for_any_torch
from tvmify.dispatch.programs import Found, Source
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.proof import Prove, loads
from tvmify.dispatch.request import Request
from tvmify.dispatch.work import Work, rejected
from tvmify.options import CompileOptions
from tvmify.runtime import Executor
from tvmify.system import forks, variables
from tvmify.target import Target

_LOG = logging.getLogger(__name__)

# Executors by the digest of their key: instances that differ only in weights share the code.
_LOADED: weakref.WeakValueDictionary[str, Executor] = weakref.WeakValueDictionary()
# Held while a program is built, so that a process builds each once. Not held while one is loaded,
# or loads would wait for builds.
_BUILDING = forks.Lock()


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
    prove
        Tests a program that is built now, before it is stored. One that is built in the background
        is only loaded.
    """

    request: Request
    program: Program
    fingerprint: str
    target: Target
    weights: Mapping[str, torch.Tensor]
    volatile: Collection[str]
    prove: Prove

    def work(self, unpacked: tuple[str, ...]) -> Work:
        """Return what has to be done if this process does not have the program.

        Parameters
        ----------
        unpacked
            Names of weights that the program may not keep packed copies of.
        """
        request, options = self.request, self.request.options
        key = keys.key(
            self.fingerprint,
            request.signature,
            self.weights,
            self.target,
            options,
            unpacked,
            sizes=request.varying.key_text() if request.varying.axes else "",
        )
        prove = self.prove if on_miss.builds_now(options) else loads
        disk = _disk(options)
        return Work(key, disk, request, self.program, self.target, unpacked, prove)


def obtain(wanted: Wanted, stages: Stages) -> Found:
    """Return a program from this process, the disk cache, or the compiler.

    Parameters
    ----------
    wanted
        If no cache has it, it is built, and stored in the disk cache.
    stages
        Notified of each stage.

    Raises
    ------
    CacheMiss
        No cache has it, and it is not built now.
    NotCompiled
        The program cannot be exported or built.
    """
    unpacked: tuple[str, ...] = ()
    while True:
        work = wanted.work(unpacked)
        key = work.key
        _log_key(key, stages)
        stages.begin("load")
        found = _shared(key) or on_miss.finished(key) or work.load()
        if found is None:
            with _BUILDING:  # another thread may have built it by now
                found = _shared(key) or on_miss.resolve(work.without_tensors(), stages)
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
    rejected.add(hash(artifact.library))
    disk = _disk(options)
    if disk is not None:
        disk.reject(key, str(problem))


def _disk(options: CompileOptions) -> DiskCache | TwoLevels | None:
    directory, url = options.cache_directory(), options.cache_url()
    if directory is None:
        return None
    near = disk_at(directory, variables.cache_limits())
    return near if url is None else TwoLevels(near, remote_at(url))
