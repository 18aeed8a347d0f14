"""The path of a call. Read this first.

    call → signature → memory cache → executor                          every call: microseconds
                └ miss → program fingerprint → disk cache → executor    a new process: milliseconds
                             └ miss → capture → compile → store         once per key and machine

Each station is a module or package of that name; this file only joins them. What cannot be
compiled raises `NotCompiled` at its station, and the call runs in eager PyTorch instead.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from tvmify import options
from tvmify.artifact import Artifact
from tvmify.cache import Key, MemoryCache, Neighbours
from tvmify.capture import Program, capture, may_ask_for_identity, present, resolve
from tvmify.dispatch import keys, on_miss, recording
from tvmify.dispatch.entry import Entries, Entry, Made, State
from tvmify.dispatch.explanation import CacheInfo, explain, warn_once
from tvmify.dispatch.found import Source
from tvmify.dispatch.load_or_build import (
    check_toolchain,
    keep,
    load_again,
    obtain,
    reject,
)
from tvmify.dispatch.numbers import General, NumberCall, Numbers, checked
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.proof import Prove, runs, unusable
from tvmify.dispatch.regions import TOO_MANY, drive_instead
from tvmify.dispatch.replay import replay
from tvmify.errors import CacheMiss, NotCompiled, TracedElsewhere, Uninitialized
from tvmify.options import CompileOptions
from tvmify.runtime import (
    Executor,
    Graphs,
    Guard,
    LatestCall,
    PackedWeights,
    Watched,
    autocast_text,
    check_modes,
    flatten,
    gradients_text,
    unusual_signature,
    watch,
)
from tvmify.signature import Signature, apart, repetitions
from tvmify.system import forks
from tvmify.system.faults import environment_fault, explained

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
TargetOption = str | Mapping[str, Any] | None

# A module that was seen in more states than this changes itself from call to call.
_MOST_STATES = 32


class Dispatcher:
    """Runs the calls of one module or function.

    Parameters
    ----------
    name
        Of the module or function, for messages.
    eager
        Computes a call in eager PyTorch; takes the module first, if there is one.
    captured
        Given the module, or None, returns what `capture` takes: an undecorated module, a
        TorchScript module, a function.
    compile_options
        The options of the decorator.
    module
        Whose weights and state the calls depend on; None for a function.
    keeps_all
        Run signatures in eager when the memory cache is full, instead of giving up others.
    calls_itself
        Whether ``eager`` may call the module, and so run the hooks of the module itself. A forward
        does not: they run around it.

    Attributes
    ----------
    name, eager, options
        As given.
    module
        Returns the module, which is held weakly.
    latest
        Makes the call that was made last again; a `Shortcut` goes straight to it.
    """

    def __init__(
        self,
        name: str,
        eager: Callable[..., Any],
        captured: Callable[[Any], Any],
        compile_options: CompileOptions,
        module: nn.Module | None = None,
        keeps_all: bool = False,
        calls_itself: bool = False,
    ) -> None:
        self.name = name
        self.options = compile_options
        self.eager = eager
        self._captured = captured
        self._watch = functools.partial(watch, own_hooks=calls_itself)
        self.module: Callable[[], nn.Module | None] = (
            weakref.ref(module) if module is not None else lambda: None
        )
        if module is not None:
            # The guard holds the dicts of the module, and they hold this: a cycle, broken here so
            # that memory is free as soon as the module is.
            weakref.finalize(module, _forget, weakref.ref(self)).atexit = False
        self._lock = forks.Lock()
        self._memory = Entries(compile_options.cache_size)
        self.latest = LatestCall()
        self._warned: set[str] = set()
        # What was costly to make, or the reason why nothing was made.
        self._made: MemoryCache[Made | NotCompiled] = MemoryCache(4 * compile_options.cache_size)
        # What was captured for signatures that are being built in the background.
        self._awaited: MemoryCache[Program] = MemoryCache(compile_options.cache_size)
        self._builds = self._disk_hits = self._eager_calls = self._postponed = 0
        self._seconds: Counter[str] = Counter()
        self._watched: Watched | None = None
        self._states: dict[Hashable, State] = {}
        self._state = State(0)
        self._weights = PackedWeights()
        self._graphs = Graphs()
        self._numbers = Numbers()
        self._unsettled: Entry | None = None
        # Names of tensors of the module that its calls write to.
        self._written: set[str] = set()
        # Tensors of closures and globals that captured programs hold by value.
        self._constants: list[torch.Tensor] = []
        self._constants_guard: Guard | None = None
        self._keeps_all = keeps_all

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Run one call.

        Raises
        ------
        NotCompiled
            With ``strict=True``, when the call cannot run compiled.
        """
        # Mostly it is the last call again, which native code finds and runs by itself.
        if (result := self.latest(args, kwargs)) is not NotImplemented:
            return result
        leaves, entry = self._find(args, kwargs)
        if entry.run is not None:
            result = entry.run(leaves)
        elif entry.driven is not None:
            result = entry.driven(args, kwargs, self.eager_call(args, kwargs))
        else:
            return self._run_in_eager(entry, args, kwargs)
        if result is NotImplemented:  # and nothing was written to yet
            refused = entry.refused(leaves)
            result = self._run_in_eager(refused, args, kwargs)
            if refused.reason is None:
                self._report(entry.failed())
            return result
        if entry.differentiable:
            return entry.with_gradients(result, self._replay(entry, args, kwargs), leaves)
        return result

    def _run_in_eager(self, entry: Entry, args: Args, kwargs: Kwargs) -> Any:
        self._report(entry)
        self._eager_calls += 1
        self._postponed += on_miss.is_postponed(entry.reason)
        return self.eager_call(args, kwargs)()

    def warm_up(self, args: Args, kwargs: Kwargs) -> Entry:
        """Do all that `__call__` does, except to return a result; wait for what is missing."""
        with on_miss.building_now():
            _, entry = self._find(args, kwargs)
            if isinstance(entry.reason, Uninitialized):
                module = self.module()
                # what is lazy itself is completed by a hook, which runs before forward
                is_lazy = isinstance(module, LazyModuleMixin)
                with torch.no_grad():
                    module(*args, **kwargs) if is_lazy else self.eager_call(args, kwargs)()
                _, entry = self._find(args, kwargs)
        self._report(entry)
        return entry

    def compiled(self, args: Args, kwargs: Kwargs, target: TargetOption = None) -> Artifact:
        """Return the code for a call, from a cache or the compiler, whether or not it is faster.

        Parameters
        ----------
        args, kwargs
            Of the call; the elements of tensors play no part.
        target
            What to build for, here or elsewhere, as the option of that name; None for the option.

        Raises
        ------
        NotCompiled
            The call cannot run compiled, whatever the options say about that.
        """
        with on_miss.building_now(), self._lock, self._stages() as stages:
            self._look_again()
            args, kwargs = apart((args, kwargs))  # files hold for all arguments of a signature
            target = target or self.options.target
            prove = self._proof(PackedWeights(), args, kwargs)
            return self._obtain(args, kwargs, target, Entry(""), stages, prove)[1].artifact

    def captured(self) -> Any:
        """Return what is captured: the plain module, or the function."""
        return self._captured(self.module())

    def examples(self) -> list[tuple[Args, Kwargs]]:
        """Return arguments for each signature that runs compiled, in the order of first calls."""
        return [entry.example() for entry in self._memory.values() if entry.is_compiled]

    def refresh(self) -> None:
        """Forget what is known of the module; the next call looks at all of it again."""
        with self._lock:
            self._watched = None
            self._unsettled = None
            self._states.clear()
            self._written.clear()
            self._state = State(self._state.number + 1)
            self._memory.clear()
            self._made.clear()
            self._awaited.clear()
            self._constants.clear()
            self._constants_guard = None
            self._numbers = Numbers()
            self.latest.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles of a module begin without one: it belongs to one module in one process.
        return type(None), ()

    def cache_info(self) -> CacheInfo:
        """Return what the caches have done so far."""
        memory, others = self._memory, self._memory.undescribed
        info = CacheInfo(
            hits=memory.hits + others.hits + self.latest.hits,
            misses=memory.misses + others.misses,
            builds=self._builds,
            disk_hits=self._disk_hits,
            entries=sum(entry.run is not None for entry in memory.values()),
            seconds=dict(self._seconds),
            eager=self._eager_calls,
            evictions=memory.evictions,
            postponed=self._postponed,
        )
        return info.with_regions(memory.values())

    def explain(self, neighbours: Neighbours | None = None) -> str:
        """Return what ran where, and why, as text."""
        neighbours = neighbours or Neighbours(self.options.cache_directory())
        return explain(self.name, self._memory.everything(), self.cache_info(), neighbours)

    # ----------------------------------------------------------------- signature → memory cache

    def _find(self, args: Args, kwargs: Kwargs) -> tuple[tuple[Any, ...], Entry]:
        leaves, signature = flatten(args, kwargs)
        if signature is None:
            leaves, signature = unusual_signature(args, kwargs)
            if signature is None:
                return leaves, self._memory.of_undescribed(args, kwargs)
        elif self._numbers.arguments:
            signature = self._numbers.find(signature, leaves, args, kwargs)
        return leaves, self._lookup(signature) or self._prepare(signature, args, kwargs)

    def _lookup(self, signature: Hashable) -> Entry | None:
        if self._unsettled is not None:
            return self._unsettled
        generation = self.latest.generation
        # Compares all weights and attributes with those of the last call, in native code.
        if self._watched is None or self._watched.guard.changed():
            self._look_again()
        entry = self._memory.load((self._state.number, signature))
        if entry is not None and entry.weights is not self._weights:
            return Entry.of_capture() or self._bind(entry)
        if entry is not None and not self._numbers.arguments:
            run, watched = entry.plain_run, self._watched  # None if another thread refreshes
            if run is not None and watched is not None:
                self.latest.keep(generation, watched.guard, signature, run)
        return entry

    def _look_again(self) -> None:
        with self._lock:
            if self._watched is not None and not self._watched.guard.changed():
                return  # another thread was here first
            if self._constants_guard is not None and self._constants_guard.changed():
                self.refresh()  # their elements are part of programs
            watched = self._watch_now()
            state = self._states.get(watched.state)
            if state is None:
                if len(self._states) >= _MOST_STATES and self._watched is not None:
                    self._unsettled = Entry.of_changes(watched.changes_since(self._watched))
                # Never a number of before, which entries in memory may still carry.
                state = self._states[watched.state] = State(self._state.number + 1)
            # The guard comes last: a thread that sees it clean must see the weights as stale.
            self._weights = PackedWeights()
            self._state = state
            self._watched = watched
            self.latest.forget()

    def _bind(self, entry: Entry) -> Entry:
        with self._lock:
            weights = self._weights
            if entry.executor is not None:
                artifact = entry.executor.artifact
                tensors, state = self._tensors(artifact.weights), self._tensors(artifact.state)
                entry.executor.bind(tensors, weights, state)
                entry.names, entry.tensors = artifact.weights + artifact.state, tensors + state
            elif entry.driven is not None:
                entry.names, entry.tensors = entry.driven.bind(self.module())
            entry.weights = weights
            return entry

    def _watch_now(self) -> Watched:
        return self._watch(self.module(), self._constants, present(self.module(), self._written))

    def eager_call(self, args: Args, kwargs: Kwargs) -> Callable[[], Any]:
        """Return what computes a call in eager PyTorch."""
        # Holds the module, which the dispatcher does not: a backward may come after its last user.
        module = self.module()
        bound = () if module is None else (module,)
        return functools.partial(self.eager, *bound, *args, **kwargs)

    def _replay(self, entry: Entry, args: Args, kwargs: Kwargs) -> Callable[[], Any]:
        """Return what computes a call in eager PyTorch later, whatever becomes of the module."""
        module, watched = self.module(), self._watched
        if module is None or watched is None:  # None if another thread refreshes
            return self.eager_call(args, kwargs)

        def call(module: Any) -> Any:
            return self.eager(module, *args, **kwargs)

        return functools.partial(replay, call, module, watched, entry.names, entry.tensors)

    def _tensors(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        return [resolve(self.module(), name) for name in names]

    # ------------------------------------------------------------------------------------- miss

    def _prepare(self, signature: Hashable, args: Args, kwargs: Kwargs) -> Entry:
        known = self._memory.known((self._state.number, signature)) or Entry.of_capture()
        if known is not None:
            return known
        may_wait = not on_miss.in_background(self.options)
        with self._lock.held(wait=may_wait) as is_held, self._stages() as stages:
            if not is_held:
                why = "another thread captures or compiles a call of this module"
                return Entry("not looked at", reason=on_miss.postponed(why))
            if self._watched is None:
                self._look_again()  # for another thread has refreshed the module meanwhile
            place = self._state.number, signature
            entry = self._memory.known(place)
            if entry is None:
                if not self._keeps_all:  # else it is of a part, which nobody calls by itself
                    recording.record(self.options, self.name, self.module(), args, kwargs)
                if self._is_full():
                    return Entry("others", reason=TOO_MANY)
                make = functools.partial(self._make_entry, args, kwargs, stages)
                found_by, entry = self._numbers.make(signature, args, kwargs, make)
                self._memory.keep(place, (self._state.number, found_by), entry)
                self.latest.forget()  # which may be the one that had to leave
                self._report_evictions()
                stages.end()
                self._seconds.update(stages.seconds)  # which adds them up
            return entry

    def _stages(self) -> Stages:
        return Stages(self.name, self.options.shows_progress())

    def _is_full(self) -> bool:
        """Tell whether signatures that are not in memory run in eager, since others would leave.

        Each costs more than many calls in eager. So a module may evict as many signatures as it
        keeps, and then no more.
        """
        size = self.options.cache_size
        if len(self._memory) < size or on_miss.is_building_now() or self.options.strict:
            return self._keeps_all and len(self._memory) >= size
        return self._keeps_all or self._memory.evictions >= size

    def _report_evictions(self) -> None:
        if self._memory.evictions:
            size = self.options.cache_size
            warn_once(
                self._warned,
                f"{self.name} was called with more than cache_size={size} signatures: the least "
                f"recently used are evicted, and after {size} of them others run in eager PyTorch. "
                "Raise cache_size, if there are not many more.",
            )

    def _make_entry(
        self, args: Args, kwargs: Kwargs, stages: Stages, general: General | None = None
    ) -> Entry:  # `general` are the arguments without the values of numbers
        entry = Entry("any arguments", weights=self._weights)
        if options.disabled():
            return entry
        try:
            keys.check_place(self.options.target, args, kwargs)
            recorded = (general.args, general.kwargs) if general else (args, kwargs)
            prove = self._proof(self._weights, args, kwargs)
            with explained("compiling it"):
                key, executor = self._obtain(*recorded, self.options.target, entry, stages, prove)
            entry.remember(args, kwargs)
            entry.take(executor)
            self._admit_writes(executor.artifact)
            stages.begin("bind")
            try:
                self._bind(entry)
                run = entry.start(executor, self._graphs if self.options.cuda_graph else None)
            except (RuntimeError, ValueError, TypeError) as error:
                if fault := environment_fault(error, "binding the weights"):
                    entry.executor = None
                    raise fault from error
                reject(key, executor.artifact, error, self.options)
                self._made.clear()
                if entry.source is Source.LOADED:
                    return self._make_entry(args, kwargs, stages, general)
                entry.executor = None
                raise unusable(error) from error
            stages.begin("compare")
            eager = self.eager_call(args, kwargs)
            if general:
                entry.run = checked(
                    NumberCall(run, general.places), executor.artifact, eager, args, kwargs
                )
            entry.check(args, kwargs, eager)
            entry.check_draws(args, kwargs, eager)
            if self.options.compares() and entry.compare(args, kwargs, eager):
                stages.begin("store")
                keep(key, executor.artifact, self.options)
            entry.follow(args, kwargs, eager, is_closure=bool(self._constants))
        except NotCompiled as reason:
            entry.reason = reason
            stages.end()  # regions count their own
            if general is None:
                drive_instead(self, self._state, entry, args, kwargs)
        return entry

    def _obtain(
        self,
        args: Args,
        kwargs: Kwargs,
        target: TargetOption,
        entry: Entry,
        stages: Stages,
        prove: Prove,
    ) -> tuple[Key, Executor]:
        """Return what a call leads to, and note on its entry where it came from."""
        forks.refuse_if_torn()
        signature = Signature.of(args, kwargs)
        entry.signature = f"{signature} {autocast_text()}".rstrip()
        assert self._watched is not None
        entry.differentiable = check_modes(self._watched, args, kwargs)
        if self._state.driven is not None:
            raise self._state.driven.reason  # that of an earlier signature
        repeated = repetitions((args, kwargs))
        if repeated and not may_ask_for_identity(self.captured()):
            repeated = {}
        modes = keys.modes_text(), gradients_text(args, kwargs), str(repeated)
        place = self._state.number, signature, *modes, str(target)
        made = self._made.peek(place)
        if isinstance(made, NotCompiled):
            raise made
        if made is not None:
            entry.notes |= made.notes
            entry.may_draw, entry.asks_for_layout = made.may_draw, made.asks_for_layout
            entry.found(made.key, Source.KEPT)
            return made.key, load_again(made.key, made.artifact)
        check_toolchain(self.options)
        stages.begin("capture")
        try:
            program = self._capture(place, args, kwargs, entry)
        except CacheMiss:
            raise
        except NotCompiled as reason:
            if not isinstance(reason, TracedElsewhere):  # which passes
                self._made.store(place, reason)
            raise
        notes, traits = dict(entry.notes), (entry.may_draw, entry.asks_for_layout)
        weights = dict(zip(program.weights, self._tensors(program.weights), strict=True))
        resolved = keys.target_of_call(signature, weights, target)
        written = {id(tensor) for tensor in present(self.module(), self._written)}
        volatile = {name for name, weight in weights.items() if id(weight) in written}
        fingerprint = program.fingerprint
        if repeated and program.asks_for_identity:
            fingerprint += f"\narguments that are one tensor: {repeated}"
        named = fingerprint, signature, weights, resolved, self.options
        key_of = functools.partial(keys.key, *named)
        call = (program, args, kwargs)
        key, found = obtain(key_of, volatile, *call, self.options, stages, prove)
        executor, source = found
        self._builds += source is Source.BUILT
        self._disk_hits += source is Source.LOADED
        entry.found(key, source)
        self._awaited.discard(place)
        self._made.store(place, Made(key, executor.artifact, notes, *traits))
        return key, executor

    def _proof(self, store: PackedWeights, args: Args, kwargs: Kwargs) -> Prove:
        eager = self.eager_call(args, kwargs)
        return functools.partial(runs, self._tensors, store, args, kwargs, eager)

    def _admit_writes(self, artifact: Artifact) -> None:
        """Let the guard overlook what the module's own calls write to."""
        written = artifact.written_state()
        if not written <= self._written:
            self._written |= written
            self._watched = self._watch_now()
            self._memory.clear()  # of programs that may have packed what now changes
            self._made.clear()

    # -------------------------------------------------- program fingerprint → key → … → executor

    def _capture(self, place: Hashable, args: Args, kwargs: Kwargs, entry: Entry) -> Program:
        program = self._state.scripted
        if program is None or not program.accepts(args, kwargs):
            program = self._awaited.peek(place)
        if program is None or not program.accepts(args, kwargs):
            with on_miss.capturing(self.options):
                program = capture(self.captured(), args, kwargs)
            if on_miss.in_background(self.options):
                self._awaited.store(place, program)
            if program.method == "torchscript":
                self._state.scripted = program  # it serves every signature
            if program.constants:
                self._constants += program.constants
                self._constants_guard = Guard([], [], self._constants)
                self._watched = self._watch_now()
        entry.note_capture(program)
        return program

    def _report(self, entry: Entry) -> None:
        """Say why a call does not run compiled: an error if strict, else a warning, once."""
        if (reason := entry.reason) is not None and not on_miss.is_awaited(reason):
            if on_miss.must_raise(reason, self.options):
                raise reason
            if isinstance(reason, Uninitialized):
                return  # as the next call will run compiled
            warn_once(
                self._warned, f"{self.name} runs in eager PyTorch: {on_miss.warning_of(reason)}"
            )


def _forget(dispatcher: weakref.ref[Dispatcher]) -> None:
    if (alive := dispatcher()) is not None:
        alive.refresh()
