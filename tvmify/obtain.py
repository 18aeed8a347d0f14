"""A key leads to an executor: from this process, from the disk cache, or from the compiler."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tvmify.artifact import Artifact
from tvmify.cache import DiskCache, Key
from tvmify.capture import Program
from tvmify.options import CompileOptions
from tvmify.runtime import Executor
from tvmify.target import Target

#: Where an executor came from, as ``explain()`` says it.
SHARED, LOADED, BUILT = "shared with another module of this process", "loaded from disk", "built"

# Executors by the digest of their key: instances that differ only in weights share the code.
_LOADED: weakref.WeakValueDictionary[str, Executor] = weakref.WeakValueDictionary()
# Held while a program is looked up on disk or built, so that a process builds each only once.
_BUILDING = threading.RLock()


def obtain(
    key: Key,
    program: Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CompileOptions,
    on_stage: Callable[[str], object],
) -> tuple[Executor, str]:
    """Return the executor of a key, without weights, and where it came from.

    Parameters
    ----------
    key
        Of the program and its signature.
    program, args, kwargs
        Built, for these arguments, if no cache has the key.
    options
        Name the disk cache. What is built is not stored yet: see `keep`.
    on_stage
        Called with the name of each stage as it begins.

    Raises
    ------
    NotCompiled
        The program cannot be exported or built.
    """
    with _BUILDING:
        on_stage("load")
        loaded = _LOADED.get(key.digest)
        if loaded is not None:
            return loaded.share(), SHARED
        disk = _disk(options)
        artifact, source = disk.load(key) if disk is not None else None, LOADED
        if artifact is None:
            target = Target.parse(key.entries["target"])
            artifact, source = _build(program, args, kwargs, target, options, on_stage), BUILT
        executor = _LOADED[key.digest] = Executor(artifact)
        return executor, source


def keep(key: Key, artifact: Artifact, options: CompileOptions) -> None:
    """Store an artifact in the disk cache, if there is one."""
    disk = _disk(options)
    if disk is not None:
        disk.store(key, artifact)


def _disk(options: CompileOptions) -> DiskCache | None:
    directory = options.cache_directory()
    return DiskCache(directory) if directory is not None else None


def _build(
    program: Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Target,
    options: CompileOptions,
    on_stage: Callable[[str], object],
) -> Artifact:
    # Imported here, since a warm process must not load TVM's compiler.
    from tvmify.compiler import compile

    on_stage("export")
    with torch.no_grad():
        exported = program.export(args, kwargs)
    return compile(exported, target, on_stage, options.accuracy)
