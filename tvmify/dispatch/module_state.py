"""The module of a dispatcher as its last call saw it: its state, its weights, and their guard."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tvmify.artifact import Artifact
from tvmify.capture import Program, present, resolve
from tvmify.dispatch.parts import MakePart, PartCalls, Parts
from tvmify.dispatch.replay import replay
from tvmify.dispatch.subject import Name, Subject
from tvmify.errors import ChangesItself, NotCompiled
from tvmify.runtime import Executor, Guard, PackedWeights, Watched, watch
from tvmify.signature import Args, Kwargs

#: A module with more states than this changes from call to call.
_MOST_STATES = 32
#: The same, for changes that its own calls make. Some modules set attributes in first calls only.
_MOST_OWN_CHANGES = 4
#: After this many, the next call runs in eager to see whether there are more, since a capture costs
#: far more.
_FEW_OWN_CHANGES = 2


@dataclass(frozen=True)
class Bound:
    """The tensors of a module that an outcome was bound to."""

    weights: PackedWeights
    tensors: Mapping[str, torch.Tensor]


@dataclass
class State:
    """One state of the module (see `tvmify.runtime.watched`), and its captured program."""

    number: int
    scripted: Program | None = None
    #: Runs the module by parts, if it cannot be one program.
    parts: Parts | None = None
    #: Runs calls whose arguments have no signature, by submodules.
    children: Parts | None = None
    #: Whether calls change attributes, so that the next call may find another state.
    changes_itself: bool = False
    #: Whether no call could be captured, so that all ran in eager, and may have set attributes;
    #: None if there was none.
    fails: bool | None = None
    #: Whether a capture has seen side effects that a later one may not have.
    had_effects: bool = False

    @property
    def sets_attributes(self) -> bool:
        """Whether calls may set attributes of the module, which forward reads itself."""
        parts = (parts for parts in (self.parts, self.children) if parts is not None)
        return self.changes_itself or any(each.runs_in_python for each in parts)


class ModuleState:
    """The module of a dispatcher; for a function, the tensors that it reads besides its arguments.

    Attributes
    ----------
    watched
        What the last call saw, with the guard that notices changes; None if the next call has to
        inspect the module.
    current
        The current state of the module.
    weights
        Its packed weights; a new object whenever a weight has changed.
    unsettled
        Why calls no longer compile, if the module changes too often.
    changes_itself
        Why its forward runs in Python, if each call changes attributes.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        # Numbers are never reused: outcomes in memory may have those of earlier states.
        self._numbers = itertools.count()
        self.watched: Watched | None = None
        self.current = State(next(self._numbers))
        self.weights = PackedWeights()
        self.unsettled: NotCompiled | None = None
        self.changes_itself: ChangesItself | None = None
        self._states: dict[Hashable, State] = {}
        self._own_changes = 0
        # Whether the latest call has changed the module.
        self._has_just_changed = False
        self._most_own_changes = 0 if subject.is_settled else _MOST_OWN_CHANGES
        # Names of what forward sets, once it runs in Python: it reads them itself.
        self._own_attributes: set[str] = set()
        # What calls each submodule, which watches it by itself, whatever the state of the module.
        self._submodules: dict[Name, tuple[weakref.ref[nn.Module], type, PartCalls]] = {}
        # Names of tensors of the module that its calls write to.
        self._written: set[str] = set()
        # Names of buffers whose values programs depend on.
        self._read: set[str] = set()
        # Tensors of closures and globals that captured programs hold by value.
        self._constants: list[torch.Tensor] = []
        self._constants_guard: Guard | None = None

    def is_unchanged(self) -> bool:
        """Whether the module has not changed since the last call."""
        return self.watched is not None and not self.watched.guard.changed()

    def constants_changed(self) -> bool:
        """Whether tensors that programs contain as constants have changed."""
        return self._constants_guard is not None and bool(self._constants_guard.changed())

    def inspect(self) -> None:
        """Inspect the whole module: find its state, and watch it for changes."""
        watched = self._watch()
        state = self._states.get(watched.state)
        is_own = self.current.sets_attributes or self.changes_itself is not None
        is_own |= state is None and all(known.fails for known in self._states.values())
        if is_own and self.watched is not None:
            names = watched.changes_since(self.watched)
            self._own_changes += bool(names)
            self._has_just_changed = bool(names)
            if self._own_changes > self._most_own_changes:
                self._leave_own(names)
                watched = self._watch()
                state = self._states.get(watched.state)
        if state is None:
            if self.watched is not None and len(self._states) >= _MOST_STATES:
                self.unsettled = _unsettled(watched.changes_since(self.watched))
            state = self._states[watched.state] = State(next(self._numbers))
        # The guard comes last: a thread that sees no change must see the new weights.
        self.weights = PackedWeights()
        self.current = state
        self.watched = watched

    def may_go_on_changing(self) -> bool:
        """Whether the next call should run without a capture, to see if it changes the module."""
        changed, self._has_just_changed = self._has_just_changed, False
        return changed and self._own_changes >= _FEW_OWN_CHANGES and self.changes_itself is None

    def _leave_own(self, names: list[str]) -> None:
        """Let forward run in Python from now on, and stop watching what it sets."""
        if self.changes_itself is None:
            self.changes_itself = ChangesItself(_changes(names))
            self._states.clear()
        self._own_attributes.update(names)

    def replay(self, bound: Bound, args: Args, kwargs: Kwargs) -> Callable[[], Any]:
        """Return a function that repeats a call in eager PyTorch with the current module.

        Parameters
        ----------
        bound
            The tensors of the module that the call read.
        """
        subject, module, watched = self._subject, self._subject.module(), self.watched
        if module is None or watched is None:  # None if another thread refreshes
            return subject.call(args, kwargs)

        def call(module: Any) -> Any:
            return subject.eager(module, *args, **kwargs)

        return functools.partial(replay, call, module, watched, bound.tensors)

    def forget(self) -> None:
        """Forget everything about the module."""
        self.watched = None
        self.unsettled = self.changes_itself = None
        self._states.clear()
        self._own_changes = 0
        self._has_just_changed = False
        self._own_attributes.clear()
        self._submodules.clear()
        self._written.clear()
        self._read.clear()
        self.current = State(next(self._numbers))
        self._constants.clear()
        self._constants_guard = None

    def submodule(self, subject: Subject, make_part: MakePart) -> PartCalls:
        """Return what calls a submodule; the same in all states of the module.

        Parameters
        ----------
        subject
            The submodule.
        make_part
            Makes its dispatcher.
        """
        child: Any = subject.module()
        known, cls, calls = self._submodules.get(subject.named, (None, None, None))
        if calls is None or known is None or known() is not child or cls is not type(child):
            calls = make_part(subject)
            self._submodules[subject.named] = weakref.ref(child), type(child), calls
        return calls

    def tensors(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        """Return the tensors of the module of these names."""
        module = self._subject.module()
        return [resolve(module, name) for name in names]

    def bind(self, executor: Executor) -> Bound:
        """Bind an executor to the current weights."""
        packed, artifact = self.weights, executor.artifact
        weights, state = self.tensors(artifact.weights), self.tensors(artifact.state)
        executor.bind(weights, packed, state)
        names = artifact.weights + artifact.state
        return Bound(packed, dict(zip(names, weights + state, strict=True)))

    def bind_parts(self, parts: Parts) -> Bound:
        """Bind the parts of the module to the current weights."""
        return Bound(self.weights, parts.bind(self._subject.module()))

    @property
    def has_constants(self) -> bool:
        """Whether programs hold tensors of closures or globals by value."""
        return bool(self._constants)

    def hold_constants(self, program: Program) -> None:
        """Watch the tensors that a program holds by value."""
        if program.constants:
            self._constants += program.constants
            self._constants_guard = Guard([], [], self._constants)
            self.watched = self._watch()

    def written(self) -> list[torch.Tensor]:
        """Return the tensors of the module that its calls write to."""
        return present(self._subject.module(), self._written)

    def admit_writes(self, artifact: Artifact) -> bool:
        """Make the guard ignore what calls write to; return whether any of it is new."""
        written = artifact.written_state()
        if written <= self._written:
            return False
        self._written |= written
        self.watched = self._watch()
        return True

    def admit_reads(self, names: tuple[str, ...]) -> None:
        """Make the values of these buffers a part of the state, since forward branches on them."""
        if not self._read.issuperset(names):
            self._read.update(names)
            self.watched = self._watch()
            self._states = {self.watched.state: self.current}

    def _watch(self) -> Watched:
        own_hooks = self._subject.calls_itself
        module = self._subject.module()
        return watch(
            module,
            self._constants,
            self.written(),
            unwatched=self._own_attributes,
            read=self._read,
            own_hooks=own_hooks,
        )


def _unsettled(names: list[str]) -> NotCompiled:
    return NotCompiled(
        _changes(names), "Keep what changes in a buffer; refresh() makes tvmify try again."
    )


def _changes(names: list[str]) -> str:
    return f"the module changes from call to call ({', '.join(names)})"
