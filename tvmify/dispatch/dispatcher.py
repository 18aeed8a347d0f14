"""The path of a call. Read this first.

    call → signature → memory cache → executor                          every call: microseconds
                └ miss → program fingerprint → disk cache → executor    a new process: milliseconds
                             └ miss → capture → compile → store         once per key and machine

A `Dispatcher` runs the calls of one module, method or function (`subject.py`). The signature of a
call leads to an outcome (`outcome.py`), which says how all such calls run:

    Compiled       by an executor, which holds a program and packed weights (`tvmify/runtime/`)
    Partitioned    by parts, each with its own dispatcher: regions of the program (`regions.py`), or
                   submodules (`submodules.py`)
    Eager          in PyTorch, because a stage raised `NotCompiled`, or PyTorch was faster

This file is the first line of the diagram. A miss makes the outcome: `misses.py` finds an existing
program that also serves this call, or decides which sizes and numbers a new one leaves open
(`generality/`), and `attempt.py` is the other two lines. `docs/path-of-a-call.md` names the files
of every stage.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from tvmify.artifact import Artifact
from tvmify.cache import Neighbours
from tvmify.dispatch import on_miss, undescribed
from tvmify.dispatch.counts import CacheInfo
from tvmify.dispatch.dispatcher_state import DispatcherState
from tvmify.dispatch.explaining import explain, info_of
from tvmify.dispatch.explanation import ExplainedSubject
from tvmify.dispatch.files import Files
from tvmify.dispatch.generality.declared import Declared
from tvmify.dispatch.generality.generalizing import Generalizing
from tvmify.dispatch.generality.numbers import Numbers
from tvmify.dispatch.generality.sizes import Sizes
from tvmify.dispatch.generality.sizes_and_numbers import SizesAndNumbers
from tvmify.dispatch.misses import Misses
from tvmify.dispatch.outcome import Compiled, Eager, Outcome, Partitioned, example
from tvmify.dispatch.parts import PartCalls
from tvmify.dispatch.programs import Programs
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.reporting import Reports
from tvmify.dispatch.subject import Subject
from tvmify.dispatch.submodules import MakeCall, Submodules
from tvmify.errors import CaptureError, Uninitialized
from tvmify.runtime import LatestCall, flatten, take_failure, unusual_signature
from tvmify.signature import Args, Kwargs
from tvmify.system import forks
from tvmify.target import TargetOption


class Dispatcher:
    """Runs the calls of one module or function.

    Parameters
    ----------
    subject
        The module or function.
    programs
        The programs of other modules that differ from this one only in their weights.

    Attributes
    ----------
    subject
        The module or function.
    state
        The module as the last call saw it, the outcomes in memory, the programs, the counts.
    module
        Returns the module of the subject.
    latest
        Runs calls with the signature of the latest one. A `Shortcut` reads this and ``module``.
    """

    def __init__(self, subject: Subject, programs: Programs | None = None) -> None:
        self.subject, self.module = subject, subject.module
        self.state = DispatcherState.of(subject, Dispatcher, programs)
        self.latest = LatestCall()
        self._lock = forks.Lock()
        self._reports = Reports(subject)
        # The submodules for other methods, and the state of the module that they are of.
        self._submodules: tuple[int, Submodules | None] = (-1, None)
        self._numbers = Numbers()
        self._sizes = Sizes(subject.options.dynamic, subject.symbols)
        self._general = Generalizing(
            [SizesAndNumbers(self._sizes, self._numbers), self._sizes, self._numbers]
        )
        self._misses = Misses(self.state, self._general, self.latest, self._reports)
        if (module := self.module()) is not None:
            # The guard refers to the module's dicts, and they refer to this object. Break the cycle
            # when the module is freed, so that its memory is freed, too.
            weakref.finalize(module, _forget, weakref.ref(self)).atexit = False

    # ------------------------------------------------------------------------------- every call

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Run one call.

        Raises
        ------
        NotCompiled
            With ``strict=True``, if the call cannot run compiled.
        """
        # Most calls have the signature of the latest one, and run in native code entirely.
        if (result := self.latest(args, kwargs)) is not NotImplemented:
            return result
        if len(kwargs) > 1:
            kwargs = self.subject.in_order(kwargs)
        leaves, outcome = self._find(args, kwargs)
        if isinstance(outcome, Compiled):
            result = outcome.run(leaves)
            if result is NotImplemented:  # nothing was written yet
                return self._run_instead(outcome, leaves, args, kwargs)
        elif isinstance(outcome, Partitioned):
            result = outcome.parts(args, kwargs, self.subject.call(args, kwargs))
        else:
            return self._run_in_eager(outcome, args, kwargs)
        if outcome.differentiable:
            replay = self.state.module.replay(outcome.bound, args, kwargs)
            return outcome.with_gradients(result, replay, leaves)
        return result

    def _find(self, args: Args, kwargs: Kwargs) -> tuple[Args, Outcome]:
        """Return the leaves of the arguments, and how the call runs."""
        leaves, signature = flatten(args, kwargs)
        if signature is None:
            outcomes = self.state.memory.undescribed
            known = outcomes.with_object(args, kwargs)
            if known is None:
                leaves, signature = unusual_signature(args, kwargs)
            if signature is None:
                outcome = known or outcomes.outcome(args, kwargs)
                if not outcome.parts_may_compile:
                    return leaves, outcome
                signature = undescribed.key_of(outcome)
        elif self._numbers.arguments:
            signature = self._numbers.find(signature, leaves, args, kwargs)
        found = self._hit(signature, kwargs) or self._missed(signature, args, kwargs)
        return leaves, found

    def _hit(self, signature: Hashable, kwargs: Kwargs) -> Outcome | None:
        """Return the outcome that memory has for a signature, bound to the current weights."""
        state = self.state.module
        if state.unsettled is not None:
            return Eager.because(state.unsettled, "any")
        generation = self.latest.generation
        watched = state.watched
        # Native code compares all weights and attributes with those of the last call.
        if watched is None or watched.guard.changed():
            self._inspect()
        outcome = self.state.memory.load((state.current.number, signature))
        if outcome is None or isinstance(outcome, Eager):
            return outcome
        if outcome.bound.weights is not state.weights:
            return Eager.during_graph_capture() or self._bind(outcome)
        # Repeat such calls in native code, unless another thread has called `latest.forget()`.
        run = outcome.plain_run if isinstance(outcome, Compiled) else None
        watched = state.watched  # None if another thread has just called refresh()
        if run is not None and watched is not None and not self._numbers.arguments:
            names, free = tuple(kwargs), self.subject.defined(kwargs)
            self.latest.keep(generation, watched.guard, signature, run, names, free)
        return outcome

    def _inspect(self) -> None:
        """Inspect a module that may have changed since the last call."""
        with self._lock:
            if self.state.module.is_unchanged():
                return  # another thread was faster
            if self.state.module.constants_changed():
                self.refresh()  # programs contain their elements
            self.state.module.inspect()
            self.latest.forget()

    def _bind(self, outcome: Compiled | Partitioned) -> Outcome:
        """Bind an outcome to the weights of the module, which have changed."""
        with self._lock:
            outcome.bind(self.state.module)
            return outcome

    def known(self, args: Args, kwargs: Kwargs) -> Outcome | None:
        """Return how a call runs that has run before; None if it was forgotten since."""
        leaves, signature = flatten(args, self.subject.in_order(kwargs))
        if signature is None:
            return None
        if self._numbers.arguments:
            signature = self._numbers.find(signature, leaves, args, kwargs)
        return self._hit(signature, kwargs)

    # ------------------------------------------------------------------------------------- miss

    def _missed(self, signature: Hashable, args: Args, kwargs: Kwargs) -> Outcome:
        """Return the outcome for a signature that memory does not have."""
        known = self.state.memory.known((self.state.module.current.number, signature))
        known = known or Eager.during_graph_capture()
        if known is not None:
            return known
        may_wait = not on_miss.in_background(self.subject.options)
        with self._lock.held(wait=may_wait) as is_held, self._stages() as stages:
            if not is_held:
                why = "another thread is capturing or compiling a call of this module"
                return Eager.because(on_miss.postponed(why), "not captured yet")
            if self.state.module.watched is None:
                self._inspect()  # another thread has called refresh()
            known = self.state.memory.known((self.state.module.current.number, signature))
            outcome = known or self._misses.outcome(signature, args, kwargs, stages)
            # One that also serves other signatures may be bound to earlier weights.
            if isinstance(outcome, Eager) or outcome.bound.weights is self.state.module.weights:
                return outcome
            return self._bind(outcome)

    def _stages(self) -> Stages:
        return Stages(self.subject.name, self.subject.options.shows_progress())

    # -------------------------------------------------------------------------- in eager instead

    def _run_in_eager(self, outcome: Eager, args: Args, kwargs: Kwargs) -> Any:
        """Run a call in eager, and report why; raise with ``strict=True``."""
        self._reports.raise_if_required(outcome)
        self.state.counts.eager += 1
        self.state.counts.postponed += on_miss.is_postponed(outcome.reason)
        result = self.subject.call(args, kwargs)()
        self._reports.warn(outcome)  # not of a call that raises in eager, too
        return result

    def _run_instead(
        self, compiled: Compiled, leaves: tuple[Any, ...], args: Args, kwargs: Kwargs
    ) -> Any:
        """Run a call in eager that compiled code refused, or failed at."""
        refused = compiled.refused(leaves)
        if refused is not None:
            return self._run_in_eager(refused, args, kwargs)
        message = take_failure()  # before eager PyTorch runs, perhaps with calls of its own
        self.state.counts.eager += 1
        result = self.subject.call(args, kwargs)()
        failed = compiled.failed(message)
        self._reports.raise_if_required(failed)
        self._reports.warn(failed)
        return result

    # --------------------------------------------------------------------------- other methods

    def view(self, call: Callable[..., Any], make_call: MakeCall) -> Any:
        """Return a view of the module, on which a method that Python runs calls compiled code.

        Parameters
        ----------
        call, make_call
            As for `Submodules`.
        """
        module, state = self.module(), self.state.module
        if not state.is_unchanged():
            self._inspect()
        number = state.current.number
        known, submodules = self._submodules
        if known != number:
            submodules = None
            with self._lock, contextlib.suppress(CaptureError):  # there is nothing to compile
                submodules = Submodules(
                    self.subject,
                    call,
                    lambda child: state.submodule(child, self.state.make_part),
                    make_call=make_call,
                )
            self._submodules = number, submodules
        return module if submodules is None else submodules.view

    def _called_by_methods(self) -> Sequence[PartCalls]:
        submodules = self._submodules[1]
        return () if submodules is None else submodules.parts

    # -------------------------------------------------------------------------- for other modules

    def warm_up(self, args: Args, kwargs: Kwargs, declared: Declared | None = None) -> Outcome:
        """Prepare a call without running it; compile in this thread, regardless of ``on_miss``.

        Parameters
        ----------
        args, kwargs
            The arguments of the call, with keywords in the order of their definition.
        declared
            Which of its sizes vary. A program that serves all of them is built, even if there is
            one for the sizes of the call.
        """
        with on_miss.building_now():
            if declared and (outcome := self._declared(args, kwargs, declared)) is not None:
                return outcome
            _, outcome = self._find(args, kwargs)
            if isinstance(outcome.reason, Uninitialized):
                module = self.module()
                # a lazy module is initialized by a hook, which runs before forward
                is_lazy = isinstance(module, LazyModuleMixin)
                with torch.no_grad():
                    module(*args, **kwargs) if is_lazy else self.subject.call(args, kwargs)()
                _, outcome = self._find(args, kwargs)
        if isinstance(outcome, Eager):
            self._reports.raise_if_required(outcome)
            self._reports.warn(outcome)
        return outcome

    def _declared(self, args: Args, kwargs: Kwargs, declared: Declared) -> Outcome | None:
        """Return the outcome with a program for all declared sizes, or None."""
        signature = flatten(args, kwargs)[1]
        with self._lock, self._stages() as stages:
            self._inspect()
            if signature is None or self.state.module.unsettled is not None:
                return None
            return self._misses.outcome(signature, args, kwargs, stages, declared)

    def compiled(self, args: Args, kwargs: Kwargs, target: TargetOption = None) -> Artifact:
        """Return the code for a call, from a cache or the compiler, even if eager is faster.

        Parameters
        ----------
        args, kwargs
            The arguments of the call, as for `warm_up`; the elements of tensors do not matter.
        target
            The target to build for, which may be another machine; None for the option ``target``.

        Raises
        ------
        NotCompiled
            The call cannot be compiled, even without ``strict=True``.
        """
        with self._files() as files:
            return files.artifact(files.request(args, kwargs, target, {}))

    def compiled_for_file(
        self, args: Args, kwargs: Kwargs, target: TargetOption, declared: Declared
    ) -> list[Artifact]:
        """Return the code for a call that a saved file should contain.

        Parameters
        ----------
        args, kwargs, target
            As for `compiled`.
        declared
            Which sizes of the call vary; empty for none. The code serves all of them.

        Raises
        ------
        NotCompiled
            The call cannot be compiled, even without ``strict=True``; or no program serves all
            declared sizes.
        """
        with self._files() as files:
            request = files.request(args, kwargs, target, declared)
            return files.declared_artifacts(request) if declared else files.artifacts(request)

    @contextlib.contextmanager
    def _files(self) -> Iterator[Files]:
        with on_miss.building_now(), self._lock, self._stages() as stages:
            self._inspect()
            yield Files(self.state, self._sizes, stages)

    def examples(self) -> list[tuple[Args, Kwargs]]:
        """Return example arguments for each signature that runs compiled, by first call."""
        outcomes = self.state.memory.values()
        return [example(found.specs) for found in outcomes if found.specs is not None]

    def refresh(self) -> None:
        """Make the next call inspect the whole module again, and retry failed compilations."""
        self.state.programs.clear()
        self.forget_module()

    def forget_module(self) -> None:
        """Forget the module and the outcomes, but keep the programs."""
        with self._lock:
            self.state.module.forget()
            self.state.memory.clear()
            self._general.forget()
            self.latest.forget()
            self._submodules = -1, None

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles of a module have no dispatcher at first: it belongs to one module.
        return type(None), ()

    def cache_info(self) -> CacheInfo:
        """Return the counts of the caches."""
        called = self._called_by_methods()
        return info_of(self.state.memory, self.state.counts, self.latest.hits, called)

    def explain(self, neighbours: Neighbours | None = None) -> ExplainedSubject:
        """Return what ran where, and why."""
        subject, outcomes = self.subject, self.state.memory.everything()
        neighbours = neighbours or Neighbours(subject.options.cache_directory())
        info, called = self.cache_info(), self._called_by_methods()
        return explain(subject.name, outcomes, info, neighbours, called)


def _forget(dispatcher: weakref.ref[Dispatcher]) -> None:
    if (alive := dispatcher()) is not None:
        alive.forget_module()
