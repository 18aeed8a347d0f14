"""Many processes share one cache directory: they race, evict each other's entries, and get killed.

``python -m tests.cache.crowds DIRECTORY 0.1`` runs a tenth of it, and prints the outcomes as JSON.
It is a separate process with one thread, so that it can fork.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cache.programs import Cheap, artifact_of, key_of
from tvmify.artifact import Artifact, Seconds, VerdictKey
from tvmify.cache import DiskCache, Limits
from tvmify.dispatch.progress import Stages

#: Seconds after which a process that should be done counts as hanging.
_PATIENCE = 300
#: The first message of a builder.
_BEGUN = -1
_FORK = multiprocessing.get_context("fork")


def race(directory: Path, processes: int, keys: int) -> dict[str, Any]:
    """Let all processes request each key at the same moment, then all keys in another order."""
    log = directory / "builds"

    def take_part(number: int) -> None:
        cache = DiskCache(directory)
        order = list(range(keys))
        for key in order:
            barrier.wait(_PATIENCE)
            _obtain(cache, key, log)
        random.Random(number).shuffle(order)
        barrier.wait(_PATIENCE)
        for key in order:
            _obtain(cache, keys + key, log)

    directory.mkdir(mode=0o700)
    barrier = _FORK.Barrier(processes)
    failed = _run_all(take_part, processes)
    builds = Counter(map(int, log.read_text().split()))
    damaged = DiskCache(directory).verify()
    return {"failed": failed, "damaged": damaged, "keys": len(builds), "most": max(builds.values())}


def evict(directory: Path, processes: int, gets: int) -> dict[str, Any]:
    """Let all processes get random keys of a cache that has room for a third of them."""
    limits = Limits(bytes=None, entries=10)

    def take_part(number: int) -> None:
        chance = random.Random(number)
        cache = DiskCache(directory, limits)
        for _ in range(gets):
            # Some keys are used all the time: they stay while others come and go.
            number = chance.choice((chance.randrange(30), chance.randrange(5)))
            _obtain(cache, number, directory / "builds")

    directory.mkdir(mode=0o700)
    failed = _run_all(take_part, processes)
    cache = DiskCache(directory, limits)
    builds = len((directory / "builds").read_text().split())
    left = [path.name for path in directory.iterdir() if path.name.startswith(".")]
    kept = len(cache.entries())
    return {
        "failed": failed,
        "damaged": cache.verify() | {str(path): "" for path in cache.quarantined()},
        "kept": kept,
        "left": left,
        "builds": builds,
        "gets": processes * gets,
    }


def kill(directory: Path, kills: int) -> dict[str, Any]:
    """Kill builders at random moments, and look at what they leave behind."""
    warnings.simplefilter("error")  # any warning about an entry is a failure
    chance = random.Random(0)
    lost, blocked, whole = [], [], set()
    directory.mkdir(mode=0o700)
    done, reports = _FORK.Pipe(duplex=False)
    for number in range(kills):
        # Half of them end between two function calls, half at any moment, also in system calls.
        calls = chance.randrange(6000) if number % 2 else None
        child = _FORK.Process(target=_store_forever, args=(directory, number, calls, reports))
        child.start()
        assert done.poll(_PATIENCE), "a builder does not begin"
        if calls is None:
            time.sleep(chance.uniform(0, 0.2))
            child.kill()
        child.join(_PATIENCE)
        assert child.exitcode == -signal.SIGKILL
        while done.poll():
            whole.add(done.recv())
        cache = DiskCache(directory)
        for key in range(60):
            loaded = cache.load(key_of(key))
            if loaded is None and key in whole:
                lost.append(key)
            assert loaded is None or _is_right(loaded, key), f"a wrong artifact for key {key}"
            with cache.building(key_of(key).digest, 1.0) as is_mine:
                blocked += [] if is_mine else [key]
    whole.remove(_BEGUN)
    _age_all(directory)
    DiskCache(directory).store(key_of(0), artifact_of(0))
    left = [path.name for path in directory.iterdir() if path.name.startswith(".")]
    return {"lost": lost, "blocked": blocked, "left": left, "whole": len(whole)}


def _store_forever(directory: Path, seed: int, calls: int | None, reports: Any) -> None:
    chance = random.Random(seed)
    cache = DiskCache(directory)
    reports.send(_BEGUN)
    if calls is not None:
        sys.setprofile(_killer(calls))
    while True:
        number = chance.randrange(60)
        key, artifact = key_of(number), artifact_of(number)
        with cache.building(key.digest, _PATIENCE):
            cache.store(key, artifact)
        reports.send(number)
        # Store it again with a verdict, which is known later.
        artifact.verdicts[VerdictKey(chance.randrange(100))] = Seconds(1.0, 2.0)
        cache.store(key, artifact)


def _killer(calls: int) -> Callable[..., None]:
    """Return a profiler that kills this process before or after `calls` calls of C functions."""
    remaining = itertools.count(calls, -1)

    def count(_frame: Any, event: str, _function: Any) -> None:
        if event.startswith("c_") and next(remaining) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def _obtain(cache: DiskCache, number: int, log: Path) -> None:
    """Get an entry as a call would, and check it."""

    def build() -> Artifact:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, f"{number}\n".encode())
        os.close(file)
        return artifact_of(number)

    work = Cheap(number, cache, build)
    found = work.load() or work.make(Stages("", visible=False))
    assert _is_right(found.executor.artifact, number), f"a wrong artifact for key {number}"


def _is_right(artifact: Artifact, number: int) -> bool:
    right = artifact_of(number)
    return artifact.library == right.library and artifact.report == right.report


def _run_all(take_part: Callable[[int], None], processes: int) -> list[int | None]:
    """Run a function in `processes` processes; return the exit codes of those that failed."""

    def strictly(number: int) -> None:
        warnings.simplefilter("error")
        take_part(number)

    started = [_FORK.Process(target=strictly, args=(i,), daemon=True) for i in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join(_PATIENCE)
    return [process.exitcode for process in started if process.exitcode != 0]


def _age_all(directory: Path) -> None:
    before = time.time() - 7200
    for path in directory.iterdir():
        if path.name.startswith("."):
            os.utime(path, (before, before))


def main() -> None:
    """Run the command line."""
    directory, part = Path(sys.argv[1]), float(sys.argv[2])
    results = {
        "race": race(directory / "race", 16, round(50 * part)),
        "evict": evict(directory / "evict", 8, round(1250 * part)),
        "kill": kill(directory / "kill", round(200 * part)),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
