"""What the dispatcher keeps for a signature, and for a state of its module."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import fx
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from tvmify.artifact import Artifact
from tvmify.cache import Key, MemoryCache
from tvmify.capture import Program
from tvmify.dispatch.agreement import check_draws, computes_the_same, refuse_unseen_draws
from tvmify.dispatch.found import Source
from tvmify.dispatch.on_miss import Missing, is_over
from tvmify.dispatch.regions import Driven
from tvmify.dispatch.submodules import Children
from tvmify.dispatch.verdict import judge
from tvmify.errors import (
    BuildError,
    GradientsNeeded,
    NotCompiled,
    TracedElsewhere,
    UnsupportedTarget,
)
from tvmify.runtime import (
    Call,
    Executor,
    GraphedCall,
    Graphs,
    PackedWeights,
    attach,
    followed_leaves,
    graph_obstacle,
    is_being_transformed,
    is_capturing,
)
from tvmify.signature import Signature, TensorSpec, map_only

if TYPE_CHECKING:
    from tvmify.dispatch.numbers import NumberCall


#: How many different reasons of calls without a signature are kept.
_MOST_REASONS = 16
#: The number of a module's state, and a signature.
Place: TypeAlias = tuple[int, Hashable]


@dataclass
class Entry:
    """What a signature leads to: an executor, or the reason why there is none."""

    signature: str
    run: Call | GraphedCall | NumberCall | None = None
    reason: NotCompiled | None = None
    executor: Executor | None = None
    #: Runs the call by regions, where it cannot be one program.
    driven: Driven | Children | None = None
    #: The packed weights that the executor was bound to, and the tensors they were made of.
    weights: PackedWeights | None = None
    names: tuple[str, ...] = ()
    tensors: list[torch.Tensor] = field(default_factory=list)
    #: Grad mode is on and weights require gradients: results lead back to them.
    differentiable: bool = False
    #: Which leaves of the result that holds for; None as long as that is not known.
    followed: list[bool] | None = None
    #: The program may draw random numbers.
    may_draw: bool = False
    #: It asks for strides, and holds for contiguous arguments alone.
    asks_for_layout: bool = False
    #: Where the code came from, if there is some.
    source: Source | None = None
    #: What a person may ask about.
    notes: dict[str, str] = field(default_factory=dict)
    #: The key of the program, if no cache had it.
    built_for: Key | None = None
    _call: tuple[Any, Any] = ((), {})  # with a `TensorSpec` for each tensor

    @classmethod
    def of_undescribed(cls, args: Any, kwargs: Any) -> Entry:
        """Return that of a call whose arguments, or surroundings, have no signature."""
        entry = cls("arguments without a signature")
        leaves = pytree.tree_leaves((args, kwargs))
        if is_being_transformed() or any(isinstance(x, fx.Proxy) for x in leaves):
            return entry
        if forward_ad._current_level >= 0:
            entry.reason = NotCompiled(
                "forward-mode differentiation is on",
                "Leave torch.autograd.forward_ad.dual_level() for calls that need no tangents.",
            )
        else:
            try:
                Signature.of(args, kwargs)
            except NotCompiled as reason:
                entry.reason = reason
        return entry

    @classmethod
    def of_changes(cls, names: Iterable[str]) -> Entry:
        """Return that of all calls of a module whose attributes of these names never settle."""
        reason = NotCompiled(
            f"the module changes from call to call ({', '.join(names)})",
            "Keep what changes in a buffer; refresh() makes tvmify try again.",
        )
        return cls("any", reason=reason)

    @classmethod
    def of_capture(cls) -> Entry | None:
        """Return that of a call that had to wait for the GPU while this thread captures a graph.

        None if it does not.
        """
        if not is_capturing():
            return None
        reason = NotCompiled(
            "a CUDA graph is captured, and code or weights are not on the GPU yet",
            "Make such a call once before the capture.",
        )
        return cls("in a CUDA graph", reason=reason)

    @property
    def is_compiled(self) -> bool:
        """Whether the call, or regions of it, run compiled."""
        return self.executor is not None or self.driven is not None

    @property
    def plain_run(self) -> Call | None:
        """What returns the result of the call itself, from its leaves alone."""
        return self.run if type(self.run) is Call and not self.differentiable else None

    def note_capture(self, program: Program) -> None:
        """Note how the call was captured."""
        self.may_draw, self.asks_for_layout = program.may_draw, program.asks_for_layout
        self.notes["captured by"] = program.method
        if program.reason is not None:
            self.notes["not scripted"] = program.reason

    def take(self, executor: Executor) -> None:
        """Keep an executor.

        Raises
        ------
        UnsupportedTarget
            It cannot run here.
        GradientsNeeded
            The program writes to tensors, which autograd would have to know of.
        """
        if executor.refusal:
            raise UnsupportedTarget(
                f"code for this target cannot run here: {executor.refusal}",
                "Leave target= out, or save() the module for a machine of that kind.",
            )
        if writes := executor.artifact.written_names():
            self.notes["writes to"] = writes
            if self.differentiable:
                raise GradientsNeeded(
                    f"forward writes to {writes}, and weights require gradients",
                    "Call under torch.no_grad() or torch.inference_mode().",
                )
        self.executor = executor

    def found(self, key: Key, source: Source) -> None:
        """Note which program serves the call, and where its code came from."""
        self.source = source
        self.notes |= {"key": key.digest, "code": source.value}
        self.built_for = key if source is Source.BUILT else None

    def remember(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what `example` makes arguments of."""
        self._call = map_only(torch.Tensor, TensorSpec.of, (args, kwargs))

    def start(self, executor: Executor, graphs: Graphs | None) -> Call | GraphedCall:
        """Return what calls run from now on, as CUDA graphs if there is a place for them."""
        if graphs is not None and (obstacle := graph_obstacle(executor.artifact)):
            self.notes["no CUDA graph"] = obstacle
        self.run = run = executor.call(graphs, contiguous=self.asks_for_layout)
        return run

    def gpu_of(self, args: Any, kwargs: Any) -> int | None:
        """Return the index of the GPU on which the tensors of a call are; None for the CPU."""
        tensors = [*pytree.tree_leaves((args, kwargs)), *self.tensors]
        gpus = (x.get_device() for x in tensors if isinstance(x, torch.Tensor) and x.is_cuda)
        return next(gpus, None)

    def check(self, args: Any, kwargs: Any, eager: Callable[[], Any]) -> None:
        """Refuse code for a GPU, if no machine has compared it yet, that computes something else.

        Raises
        ------
        BuildError
            It does not compute this call as eager PyTorch does, or that cannot be seen.
        """
        executor, run, gpu = self.executor, self.run, self.gpu_of(args, kwargs)
        leaves = tuple(pytree.tree_leaves((args, kwargs)))
        if gpu is None or executor is None or run is None or executor.artifact.verdicts:
            return
        if executor.artifact.writes or run.obstacle(leaves):
            return  # nothing may be written twice
        calls = 3 if isinstance(run, GraphedCall) else 1  # the last replays what the second was
        try:
            repeat = lambda: [_result(run, leaves) for _ in range(calls)][-1]  # noqa: E731
            agrees = computes_the_same(repeat, eager, gpu)
        except torch.OutOfMemoryError as error:
            self.run = self.executor = None
            raise BuildError(
                "the GPU has not enough memory to compare compiled code with eager",
                "Free some, and call refresh().",
            ) from error
        if not agrees:
            self.run = self.executor = None
            raise BuildError(
                "code that was built for the GPU does not compute what eager PyTorch does",
                "Please report it, with the module and the shapes of its arguments.",
            )

    def check_draws(self, args: Any, kwargs: Any, eager: Callable[[], Any]) -> None:
        """Refuse code that does not draw random numbers exactly as eager PyTorch does.

        Raises
        ------
        GradientsNeeded, NotCompiled
            The backward, which runs forward again, would draw others, or already the call does.
        """
        executor, run = self.executor, self.run
        leaves = tuple(pytree.tree_leaves((args, kwargs)))
        if not self.may_draw or executor is None or run is None:
            return
        try:
            if written := executor.artifact.written_names():  # nothing may be written twice
                refuse_unseen_draws(executor.artifact.draws, written)
            elif not run.obstacle(leaves):
                sides = lambda: _result(run, leaves), eager
                check_draws(*sides, self.gpu_of(args, kwargs), self.differentiable)
        except NotCompiled:
            self.run = self.executor = None
            raise

    def refused(self, leaves: tuple[Any, ...]) -> Entry:
        """Return why compiled code left a call to eager; no reason if it failed, as eager will."""
        assert self.run is not None
        obstacle = self.run.obstacle(leaves)
        if obstacle is None:
            return Entry(self.signature)
        next_step = "Give it memory of its own: clone it before the call."
        return Entry(self.signature, reason=NotCompiled(obstacle, next_step))

    def failed(self) -> Entry:
        """Return why a call ran in eager, which did not raise as compiled code did."""
        reason = NotCompiled(
            "compiled code raised an error where eager PyTorch does not",
            "Please report it, with the module and the shapes of its arguments.",
        )
        return Entry(self.signature, reason=reason)

    def compare(self, args: Any, kwargs: Any, eager: Callable[[], Any]) -> bool:
        """Leave to eager PyTorch what it computes faster; return whether that is news."""
        executor, run = self.executor, self.run
        leaves = tuple(pytree.tree_leaves((args, kwargs)))
        # Nothing may be written twice, nor measured what is not for compiled code.
        if executor is None or run is None or executor.artifact.writes or run.obstacle(leaves):
            return False
        how = "with CUDA graphs" if isinstance(run, GraphedCall) else ""
        sides = lambda: _result(run, leaves), eager
        gpu = self.gpu_of(args, kwargs)
        verdict, is_new = judge(executor.artifact.verdicts, *sides, gpu, how)
        if verdict is not None:
            self.notes["compared"] = str(verdict)
            if not verdict.is_for_compiled:
                self.run = self.executor = None
        return is_new

    def follow(self, args: Any, kwargs: Any, eager: Callable[[], Any], *, is_closure: bool) -> None:
        """Note which leaves of the result have gradients, if any may be asked for.

        Raises
        ------
        GradientsNeeded
            They lead to tensors of a closure, which the program holds as constants.
        """
        is_wanted = self.differentiable or (is_closure and torch.is_grad_enabled())
        if self.executor is None or self.executor.artifact.writes or not is_wanted:
            return  # nothing may be written twice
        try:
            followed = followed_leaves(eager, self.gpu_of(args, kwargs))
        except Exception:  # of any kind: the call itself will raise it again
            return
        if any(followed) and not self.differentiable:
            self.run = self.executor = None
            raise GradientsNeeded(
                "a tensor of a closure, or a global one, requires a gradient",
                "Call under torch.no_grad() or torch.inference_mode(), or decorate the module that "
                "it belongs to.",
            )
        self.followed = followed

    def with_gradients(self, result: Any, eager: Callable[[], Any], leaves: tuple[Any, ...]) -> Any:
        """Return the result of a call so that its gradients lead back, through eager PyTorch."""
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self.executor is None:
            return attach(result, eager, inputs, self.tensors, None)
        if self.followed is None:
            self.follow(leaves, None, eager, is_closure=False)
        outputs = self.executor.artifact.outputs
        return attach(result, eager, inputs, self.tensors, outputs, self.followed)

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of a call of this signature, with tensors of zeros."""
        return map_only(TensorSpec, TensorSpec.example, self._call)


def _result(run: Callable[[tuple[Any, ...]], Any], leaves: tuple[Any, ...]) -> Any:
    """Return the result of a call of compiled code, or raise where it leaves that to eager."""
    result = run(leaves)
    if result is NotImplemented:
        raise RuntimeError("compiled code failed")
    return result


@dataclass(frozen=True)
class Made:
    """What it was costly to make for a signature: it outlives the executor in the memory cache.

    Attributes
    ----------
    key, artifact
        Of the program.
    notes
        How it was captured.
    may_draw, asks_for_layout
        See `Entry`.
    """

    key: Key
    artifact: Artifact
    notes: dict[str, str]
    may_draw: bool
    asks_for_layout: bool


@dataclass
class State:
    """One state of the module (see `tvmify.runtime.watch`), and what it was captured as."""

    number: int
    scripted: Program | None = None
    #: Runs it by regions, where it cannot be one program.
    driven: Driven | Children | None = None


class Entries(MemoryCache[Entry]):
    """The entries of a dispatcher by state and signature, and apart from them its misses."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        # Not among the values, since a hit is not asked whether it is one.
        self._missing: MemoryCache[Entry] = MemoryCache(size)
        #: By their reasons, those of calls without a signature.
        self.undescribed: MemoryCache[Entry] = MemoryCache(_MOST_REASONS)
        self.evictions = 0

    def known(self, place: Hashable) -> Entry | None:
        """Return an entry that was made before, unless it is worth making again."""
        entry = self.peek(place) or self._missing.peek(place)
        return None if entry is None or is_over(entry.reason) else entry

    def keep(self, place: Place, found_by: Place, entry: Entry) -> None:
        """Keep an entry.

        Parameters
        ----------
        place
            Where the call looked for it.
        found_by
            Where later calls will look, if it is more than a miss.
        """
        if isinstance(entry.reason, Missing):
            earlier = self._missing.peek(place)
            entry.reason.follow(earlier and earlier.reason)
        if isinstance(entry.reason, (Missing, TracedElsewhere)):
            entry.reason.__traceback__ = None  # whose frames hold the arguments of the call
            self._missing.store(place, entry)
        else:
            self._missing.discard(place)
            # What earlier states of the module have left behind is in nobody's way.
            evicted = cast("list[Place]", self.store(found_by, entry))
            self.evictions += sum(state == found_by[0] for state, _ in evicted)

    def of_undescribed(self, args: Any, kwargs: Any) -> Entry:
        """Return that of a call whose arguments, or surroundings, have no signature."""
        entry = Entry.of_undescribed(args, kwargs)
        if entry.reason is None:
            return entry
        known = self.undescribed.load(entry.reason.reason)
        if known is None:
            self.undescribed.store(entry.reason.reason, entry)
        return known or entry

    def clear(self) -> None:
        """Forget all of them."""
        super().clear()
        self._missing.clear()
        self.undescribed.clear()
        self.evictions = 0

    def everything(self) -> list[Entry]:
        """Return the entries, then the misses, then those of calls without a signature."""
        return [*self.values(), *self._missing.values(), *self.undescribed.values()]
