"""What a call does when no cache has its program: the option ``on_miss``."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from tvmify.artifact.stages import Stage
from tvmify.cache import Key, Neighbours
from tvmify.dispatch.building import background
from tvmify.dispatch.building.allowance import allowance
from tvmify.dispatch.building.background import Job
from tvmify.dispatch.keys import is_in_its_modes
from tvmify.dispatch.programs import Found
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.request import Request
from tvmify.errors import BuildError, CacheMiss, NotCompiled, SmallStack, TracedElsewhere, described
from tvmify.options import CompileOptions
from tvmify.runtime import casting, casts_now
from tvmify.system.faults import environment_fault
from tvmify.system.stack import has_small_stack
from tvmify.torch_compat.tracing import tracer_elsewhere

# Background jobs by the digest of their key, as long as an outcome refers to them.
_jobs: weakref.WeakValueDictionary[str, Job] = weakref.WeakValueDictionary()
_now = threading.local()
_NOT_BUILT = "no cache has its program, and on_miss='eager'. Run `tvmify warmup`; see explain()."
_MANY_WAIT = "the build queue is full, so some programs are built later; see explain()."


class Missing(CacheMiss):
    """A cache miss, and when to look up the program again.

    Parameters
    ----------
    reason, next_step
        As for `NotCompiled`; shown by `explain()`.
    warning
        The warning to give once per module; the same for all of its calls.
    is_over
        Returns whether the next lookup may find the program.
    job
        The background job that builds the program, if there is one.
    is_postponed
        Whether the capture was postponed, so there is no job to wait for.

    Attributes
    ----------
    job, is_postponed
        As given.
    earlier
        The previous miss of the same call, whose job led to this one.
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
        """Keep the jobs of earlier misses of the same call alive."""
        if isinstance(earlier, Missing):
            has_outcome = earlier.job is not None and (earlier.job.result or earlier.job.error)
            self.earlier = earlier if has_outcome else earlier.earlier

    def is_over(self) -> bool:
        """Whether the next lookup may find the program."""
        return self._is_over() or is_building_now()

    def __reduce__(self) -> tuple[type[NotCompiled], tuple[str, str]]:
        return CacheMiss, (self.reason, self.next_step)


@contextlib.contextmanager
def building_now() -> Iterator[None]:
    """Compile missing programs in this thread, regardless of ``on_miss``, as for `warmup`."""
    before = is_building_now()
    _now.builds = True
    try:
        yield
    finally:
        _now.builds = before


def is_building_now() -> bool:
    """Whether this thread is inside `building_now`."""
    return getattr(_now, "builds", False)


def builds(options: CompileOptions) -> bool:
    """Whether a missing program is compiled, now or in the background."""
    return options.on_miss in ("build", "background") or is_building_now()


def builds_now(options: CompileOptions) -> bool:
    """Whether a call waits until its missing program is compiled."""
    return options.on_miss == "build" or is_building_now()


def must_raise(reason: NotCompiled, options: CompileOptions) -> bool:
    """Whether a call that cannot run compiled raises the reason."""
    return options.on_miss == "error" if isinstance(reason, CacheMiss) else options.strict


def is_over(reason: NotCompiled | None) -> bool:
    """Whether a reason no longer holds, so that the call should try again."""
    if isinstance(reason, SmallStack):
        return not has_small_stack()
    if isinstance(reason, TracedElsewhere):
        return tracer_elsewhere() is None
    return isinstance(reason, Missing) and reason.is_over()


def warning_of(reason: NotCompiled) -> str:
    """Return the text of the warning for a reason."""
    return reason.warning if isinstance(reason, Missing) else str(reason)


def is_awaited(reason: NotCompiled | None) -> bool:
    """Whether the program of a call is being built in the background, or will be."""
    return isinstance(reason, Missing) and (reason.job is not None or reason.is_postponed)


def is_postponed(reason: NotCompiled | None) -> bool:
    """Whether the capture of a call's program was postponed, so there is nothing to wait for."""
    return isinstance(reason, Missing) and reason.is_postponed


def in_background(options: CompileOptions) -> bool:
    """Whether missing programs are built in the background and calls never wait for them."""
    return options.on_miss == "background" and not is_building_now()


def postponed(why: str) -> Missing:
    """Return the reason for running a call in eager because a capture would block calls."""
    next_step = "Nothing to do: a later call will capture it."
    return Missing(why, next_step, "", allowance.has_room, is_postponed=True)


@contextlib.contextmanager
def capturing(options: CompileOptions) -> Iterator[None]:
    """Count the time of a capture against the allowance, with ``on_miss="background"``.

    Raises
    ------
    CacheMiss
        The allowance is used up, or another thread is using it.
    """
    if not in_background(options):
        yield
        return
    with allowance.spend() as may_begin:
        if not may_begin:
            raise postponed(
                "not captured yet: the time that calls may spend on captures is used up for now"
            )
        yield


def finished(key: Key) -> Found | None:
    """Return the program that was built in the background for a key, or None.

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
        return None  # another job may succeed
    del job  # or the error's traceback would keep the job alive
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


class Buildable(Protocol):
    """A program that is in no cache: `tvmify.dispatch.work.Work`."""

    @property
    def key(self) -> Key:
        """The key of the program."""
        ...

    @property
    def request(self) -> Request:
        """What it is built for."""
        ...

    def export(self, stages: Stages) -> object:
        """Run the first stage of the build, which fails if the program cannot be captured."""

    def make(self, stages: Stages) -> Found:
        """Build the program; may be called later, in another thread."""
        ...


def resolve(work: Buildable, stages: Stages) -> Found:
    """Handle a program that is in no cache, as ``on_miss`` says.

    Raises
    ------
    CacheMiss
        The program is not compiled now.
    NotCompiled
        The program cannot be compiled.
    """
    key, options = work.key, work.request.options
    if builds_now(options):
        return work.make(stages)
    reason = f"no cache has the program of this call (key {key.digest[:16]})"
    if options.on_miss == "background":
        job = _submitted(work)
        if job is None:
            queue = f"{reason}, and the build queue is full ({background.MOST_WAITING} programs)"
            raise Missing(
                queue, "Nothing to do: it is built later.", _MANY_WAIT, background.has_room
            )
        waits = f"{reason}; it is being built in the background"
        raise Missing(
            waits, "Nothing to do: a later call will run it.", "", lambda: job.is_over, job
        )
    work.export(stages)  # raises for control flow that depends on values, so that regions are tried
    title, *lines = Neighbours(options.cache_directory()).lines(key) or [""]
    reason += f"; {title} {'; '.join(lines)}" if lines else ""
    warm_up = "Compile it ahead of time with `tvmify warmup` or warmup()"
    if options.on_miss == "error":
        raise Missing(reason, f"{warm_up}; or use another on_miss.", "")
    next_step = f"{warm_up}, and call refresh(); or use another on_miss."
    raise Missing(reason, next_step, _NOT_BUILT, lambda: False)


def _submitted(work: Buildable) -> Job | None:
    """Return the job that builds a program, a new one if needed; None if the queue is full."""
    digest = work.key.digest
    job = _jobs.get(digest)
    if job is not None and not job.is_over:
        return job
    job = Job(_in_the_background(work))
    if not background.worker.submit(job):
        return None
    _jobs[digest] = job
    return job


def _in_the_background(work: Buildable) -> Callable[[Callable[[], None]], object]:
    """Return a function that builds in this thread's modes; it returns None if they changed."""
    casts, device = casts_now(), torch.get_default_device()
    is_inference = torch.is_inference_mode_enabled()  # its tensors cannot be traced outside it

    def run(between: Callable[[], None]) -> object:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(casting(casts))
            if device != torch.get_default_device():
                stack.enter_context(device)
            stages = _Watchful(between, work.key)
            try:
                built = work.make(stages)
            except _OtherModes:
                return None
            finally:
                stages.end()
            return built if is_in_its_modes(work.key) else None

    return run


class _OtherModes(BaseException):
    """Process-wide modes have changed since the call; `except Exception` must not catch this."""


class _Watchful(Stages):
    """Stages without a display, between which a build can be cancelled.

    A program that was captured in other modes than its key's is not stored.
    """

    threads = 1

    def __init__(self, between: Callable[[], None], key: Key) -> None:
        super().__init__("in the background", visible=False)
        self._between = between
        self._key = key

    def begin(self, name: Stage) -> None:
        self._between()
        # Not in other stages: the compiler turns autocast off itself.
        if name in ("export", "store") and not is_in_its_modes(self._key):
            raise _OtherModes
        super().begin(name)

    def advance(self, done: int, total: int) -> None:
        self._between()
