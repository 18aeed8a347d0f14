"""A key leads to an executor: from this process, from the disk cache, or from the compiler."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from tvmify.artifact import Artifact
from tvmify.cache import DiskCache, Key, Measurements
from tvmify.capture import Program
from tvmify.keys import processor
from tvmify.options import CompileOptions
from tvmify.progress import Stages
from tvmify.runtime import Executor, measure
from tvmify.target import Target

#: Where an executor came from, as ``explain()`` says it.
SHARED, LOADED, BUILT = "shared with another module of this process", "loaded from disk", "built"

# Executors by the digest of their key: instances that differ only in weights share the code.
_LOADED: weakref.WeakValueDictionary[str, Executor] = weakref.WeakValueDictionary()
# Held while a program is looked up on disk or built, so that a process builds each only once.
_BUILDING = threading.RLock()


def obtain(
    key_of: Callable[[Sequence[str]], Key],
    volatile: Collection[str],
    program: Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CompileOptions,
    stages: Stages,
) -> tuple[Key, Executor, str]:
    """Return the key of a program, its executor without weights, and where that came from.

    Parameters
    ----------
    key_of
        Returns the key of the program and its signature; takes ``unpacked`` of `tvmify.keys.key`.
    volatile
        Names of weights that other calls write to: the program may not keep packed copies of them.
    program, args, kwargs
        Built, for these arguments, if no cache has the key.
    options
        Name the disk cache. What is built is not stored yet: see `keep`.
    stages
        Told the name of each stage as it begins.

    Raises
    ------
    NotCompiled
        The program cannot be exported or built.
    """
    with _BUILDING:
        unpacked: list[str] = []
        while True:
            key = key_of(unpacked)
            stages.begin("load")
            loaded = _LOADED.get(key.digest)
            if loaded is not None:
                executor, source = loaded.share(), SHARED
            else:
                disk = _disk(options)
                artifact, source = disk.load(key) if disk is not None else None, LOADED
                if artifact is None:
                    artifact = _build(key, program, args, kwargs, options, stages, unpacked)
                    source = BUILT
                executor = _LOADED[key.digest] = Executor(artifact)
            stale = [name for name in executor.artifact.weights if name in volatile]
            if not stale:
                return key, executor, source
            unpacked = stale


def keep(key: Key, artifact: Artifact, options: CompileOptions) -> None:
    """Store an artifact in the disk cache, if there is one."""
    disk = _disk(options)
    if disk is not None:
        disk.store(key, artifact)


def _disk(options: CompileOptions) -> DiskCache | None:
    directory = options.cache_directory()
    return DiskCache(directory) if directory is not None else None


def _build(
    key: Key,
    program: Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CompileOptions,
    stages: Stages,
    unpacked: Sequence[str],
) -> Artifact:
    # Imported here, since a warm process must not load TVM's compiler.
    from tvmify.compiler import Tuning, compile

    stages.begin("export")
    with torch.no_grad():
        exported = program.export(args, kwargs)
    target = Target.parse(key.entries["target"])
    tuning = None
    if options.tune is not None:
        database = Measurements(options.cache_directory(), processor(key))
        tuning = Tuning(measure, database, stages.advance)
    # The program casts what autocast would: what the compiler calls is not to cast again.
    with torch.autocast("cpu", enabled=False):
        return compile(exported, target, stages.begin, options.accuracy, tuning, unpacked)
