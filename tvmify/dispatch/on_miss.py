"""What a call does when no cache has its program: the option ``on_miss``."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from tvmify.cache import Key, Neighbours
from tvmify.dispatch import background
from tvmify.dispatch.allowance import allowance
from tvmify.dispatch.background import Job
from tvmify.dispatch.found import Found
from tvmify.dispatch.keys import modes_text
from tvmify.dispatch.progress import Stages
from tvmify.errors import BuildError, CacheMiss, NotCompiled, TracedElsewhere, described
from tvmify.options import CompileOptions
from tvmify.runtime import casting, casts_now
from tvmify.system.faults import environment_fault
from tvmify.torch_compat.tracing import tracer_elsewhere

#: Given the stages to announce, returns a program.
Build: TypeAlias = Callable[[Stages], Found]

# By the digest of the key: what is being built in the background, as long as a call wants it.
_jobs: weakref.WeakValueDictionary[str, Job] = weakref.WeakValueDictionary()
_now = threading.local()
_NOT_BUILT = (
    "no cache has its program, and on_miss='eager'. Run `tvmify warmup`; explain() says more."
)
_MANY_WAIT = "more programs are to be built than may wait. They will be; explain() says more."


class Missing(CacheMiss):
    """A miss, and when to look again.

    Parameters
    ----------
    reason, next_step
        As for `NotCompiled`; `explain()` has them.
    warning
        What is said once per module, and equal for all of its calls.
    is_over
        Whether a call that looks again may find more.
    job
        What builds it meanwhile, if anything does.
    is_postponed
        Whether it was not even asked for yet, so that the call need not wait for that.

    Attributes
    ----------
    job, is_postponed
        As given.
    earlier
        A miss of the same call before this one, whose job led to this one.
    """

    def __init__(
        self,
        reason: str,
        next_step: str,
        warning: str,
        is_over: Callable[[], bool] = lambda: True,
        job: Job | None = None,
        *,
        is_postponed: bool = False,
    ) -> None:
        super().__init__(reason, next_step)
        self.warning = warning
        self.is_postponed = is_postponed
        self._is_over = is_over
        self.job = job
        self.earlier: Missing | None = None

    def follow(self, earlier: NotCompiled | None) -> None:
        """Keep what was built for the misses of the same call before this one."""
        if isinstance(earlier, Missing):
            has_outcome = earlier.job is not None and (earlier.job.result or earlier.job.error)
            self.earlier = earlier if has_outcome else earlier.earlier

    def is_over(self) -> bool:
        """Whether it is worth looking again."""
        return self._is_over() or is_building_now()

    def __reduce__(self) -> tuple[type[NotCompiled], tuple[str, str]]:
        return CacheMiss, (self.reason, self.next_step)


@contextlib.contextmanager
def building_now() -> Iterator[None]:
    """Compile in this thread what is missing, whatever ``on_miss`` says: somebody asked for it."""
    before = is_building_now()
    _now.builds = True
    try:
        yield
    finally:
        _now.builds = before


def is_building_now() -> bool:
    """Tell whether somebody asked this thread to compile what is missing."""
    return getattr(_now, "builds", False)


def builds(options: CompileOptions) -> bool:
    """Tell whether a program that is in no cache is compiled, now or in the background."""
    return options.on_miss in ("build", "background") or is_building_now()


def builds_now(options: CompileOptions) -> bool:
    """Tell whether the call that needs such a program waits until it is compiled."""
    return options.on_miss == "build" or is_building_now()


def must_raise(reason: NotCompiled, options: CompileOptions) -> bool:
    """Tell whether a call raises the reason that it cannot run compiled."""
    return options.on_miss == "error" if isinstance(reason, CacheMiss) else options.strict


def is_over(reason: NotCompiled | None) -> bool:
    """Tell whether a reason has passed, so that it is worth looking again."""
    if isinstance(reason, TracedElsewhere):
        return tracer_elsewhere() is None
    return isinstance(reason, Missing) and reason.is_over()


def warning_of(reason: NotCompiled) -> str:
    """Return what a person is told of a reason at first."""
    return reason.warning if isinstance(reason, Missing) else str(reason)


def is_awaited(reason: NotCompiled | None) -> bool:
    """Tell whether the program of a call is being built in the background, or will be."""
    return isinstance(reason, Missing) and (reason.job is not None or reason.is_postponed)


def is_postponed(reason: NotCompiled | None) -> bool:
    """Tell whether the program of a call was not asked for, so that it need not wait for that."""
    return isinstance(reason, Missing) and reason.is_postponed


def in_background(options: CompileOptions) -> bool:
    """Tell whether calls of this thread wait for nothing that is missing."""
    return options.on_miss == "background" and not is_building_now()


def postponed(why: str) -> Missing:
    """Return why a call runs in eager that would have had to wait, or to keep others waiting."""
    next_step = "Nothing: a later call will capture it."
    return Missing(why, next_step, "", allowance.has_room, is_postponed=True)


@contextlib.contextmanager
def capturing(options: CompileOptions) -> Iterator[None]:
    """Capture a program in here; calls that wait for nothing spend their allowance on it.

    Raises
    ------
    CacheMiss
        There is none left, or another thread is spending it.
    """
    if not in_background(options):
        yield
        return
    with allowance.spend() as may_begin:
        if not may_begin:
            raise postponed(
                "it is not captured yet: for now, calls have spent enough time on capturing"
            )
        yield


def finished(key: Key) -> Found | None:
    """Return what was built in the background for a key, if anything was.

    Raises
    ------
    NotCompiled
        The build failed.
    """
    job = _jobs.get(key.digest)
    if job is None or not job.is_over:
        return None
    result, error = job.result, job.error
    if isinstance(error, TracedElsewhere):
        return None  # another job may have better luck
    del job  # else who keeps the error would keep it, too
    if error is None:
        return result
    if isinstance(error, NotCompiled):
        raise error
    if fault := environment_fault(error, "the build in the background"):
        raise fault from error
    raise BuildError(
        f"the build in the background failed: {described(error)}",
        "Call refresh() to try again, or use on_miss='build' to see where it fails.",
    ) from error


def resolve(
    key: Key,
    build: Build,
    export: Callable[[], object],
    options: CompileOptions,
    stages: Stages,
) -> Found:
    """Do what ``on_miss`` says about a program that is in no cache.

    Parameters
    ----------
    build
        Compiles it. It may be called in another thread, and later.
    export
        The first part of that, which finds out whether there can be such a program.

    Raises
    ------
    CacheMiss
        It is not compiled now.
    NotCompiled
        It cannot be compiled.
    """
    if builds_now(options):
        return build(stages)
    reason = f"no cache has the program of this call (key {key.digest[:16]})"
    if options.on_miss == "background":
        job = _submitted(key, build)
        if job is None:
            queue = f"{reason}, and {background.MOST_WAITING} others wait to be built before it"
            raise Missing(queue, "Nothing: it will be.", _MANY_WAIT, background.has_room)
        waits = f"{reason}; it is being built in the background"
        raise Missing(waits, "Nothing: a later call will run it.", "", lambda: job.is_over, job)
    export()  # control flow that depends on values leads to other programs, those of regions
    title, *lines = Neighbours(options.cache_directory()).lines(key) or [""]
    reason += f"; {title} {'; '.join(lines)}" if lines else ""
    warm_up = "Compile it ahead, with `tvmify warmup` or warmup()"
    if options.on_miss == "error":
        raise Missing(reason, f"{warm_up}; or use another on_miss.", "")
    next_step = f"{warm_up}, and call refresh(); or use another on_miss."
    raise Missing(reason, next_step, _NOT_BUILT, lambda: False)


def _submitted(key: Key, build: Build) -> Job | None:
    """Return the job that builds a key, a new one if there is none; None if too many wait."""
    job = _jobs.get(key.digest)
    if job is not None and not job.is_over:
        return job
    job = Job(_in_the_background(key, build))
    if not background.worker.submit(job):
        return None
    _jobs[key.digest] = job
    return job


def _in_the_background(key: Key, build: Build) -> Callable[[Callable[[], None]], object]:
    """Return what builds in the modes of this thread; None as the result says that others hold."""
    casts, device = casts_now(), torch.get_default_device()
    is_inference = torch.is_inference_mode_enabled()  # tensors made so cannot be recorded without

    def run(between: Callable[[], None]) -> object:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(casting(casts))
            if device != torch.get_default_device():
                stack.enter_context(device)
            stages = _Watchful(between, key.entries["modes"])
            try:
                built = build(stages)
            except _OtherModes:
                return None
            finally:
                stages.end()
            return built if modes_text() == key.entries["modes"] else None

    return run


class _OtherModes(BaseException):
    """Modes that hold for all threads have changed since the call. Not for `except Exception`."""


class _Watchful(Stages):
    """Stages that nobody sees, and between which a build can be given up.

    What was recorded under other modes than those of its key is not stored.
    """

    threads = 1

    def __init__(self, between: Callable[[], None], modes: str) -> None:
        super().__init__("", visible=False)
        self._between = between
        self._modes = modes

    def begin(self, name: str) -> None:
        self._between()
        # Others are the compiler's own, which turns autocast off.
        if name in ("export", "store") and modes_text() != self._modes:
            raise _OtherModes
        super().begin(name)

    def advance(self, done: int, total: int) -> None:
        self._between()
