"""What a signature leads to: compiled code, parts that are compiled, or eager PyTorch."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import fx
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from tvmify.artifact.shapes import Shapes
from tvmify.cache import Key
from tvmify.dispatch.found import Source
from tvmify.dispatch.module_state import Bound, ModuleState
from tvmify.dispatch.parts import Parts
from tvmify.dispatch.programs import Captured
from tvmify.dispatch.verdict import Verdict
from tvmify.errors import NotCompiled
from tvmify.runtime import (
    Call,
    Executor,
    attach,
    followed_leaves,
    is_being_transformed,
    is_capturing,
)
from tvmify.signature import Signature, TensorSpec, map_only

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


class Run(Protocol):
    """What runs a program."""

    def __call__(self, leaves: Args, /) -> Any:
        """Return the result of a call, given the leaves of its arguments."""

    def obstacle(self, leaves: Args, /) -> str | None:
        """Return why these leaves cannot be its arguments; None if they can."""


class Choice(enum.Enum):
    """Why a call is left to eager PyTorch although nothing stands in the way."""

    DISABLED = "TVMIFY_DISABLE is set"
    FASTER = "eager PyTorch is faster here"
    TRANSFORMED = "the call is traced or transformed"
    UNDESCRIBED = "native code cannot describe its arguments"


@dataclass(frozen=True)
class Facts:
    """What a person may ask about an outcome.

    Attributes
    ----------
    title
        The signature as text.
    captured
        How the program was captured, if it was.
    key, source
        Of the program, and where its code came from, if there is some.
    writes
        What calls write to, besides their results.
    no_graph
        Why calls cannot be captured as CUDA graphs, if that was asked for.
    verdict
        How long compiled code and eager PyTorch take, if they were compared.
    shapes
        What sizes the program serves, if it serves several.
    one_shape
        Why it serves one shape only, where sizes were seen to vary.
    """

    title: str = "any arguments"
    captured: Captured | None = None
    key: Key | None = None
    source: Source | None = None
    writes: str = ""
    no_graph: str = ""
    verdict: Verdict | None = None
    shapes: Shapes | None = None
    one_shape: NotCompiled | None = None


@dataclass(frozen=True, eq=False)
class Eager:
    """A call runs in eager PyTorch.

    Attributes
    ----------
    facts
        What is known of it all the same.
    why
        What keeps it from being compiled, or the choice not to use compiled code.
    """

    facts: Facts
    why: NotCompiled | Choice

    @property
    def reason(self) -> NotCompiled | None:
        """What keeps the call from being compiled; None for a choice."""
        return None if isinstance(self.why, Choice) else self.why

    @classmethod
    def because(cls, why: NotCompiled | Choice, title: str) -> Eager:
        """Return that of a call of which nothing else is known."""
        return cls(Facts(title), why)

    @classmethod
    def of_undescribed(cls, args: Args, kwargs: Kwargs) -> Eager:
        """Return that of a call whose arguments, or surroundings, have no signature."""
        return cls.because(_why_undescribed(args, kwargs), "arguments without a signature")

    @classmethod
    def of_capture(cls) -> Eager | None:
        """Return that of a call that had to wait for the GPU while this thread captures a graph.

        None if it does not.
        """
        if not is_capturing():
            return None
        reason = NotCompiled(
            "a CUDA graph is captured, and code or weights are not on the GPU yet",
            "Make such a call once before the capture.",
        )
        return cls.because(reason, "in a CUDA graph")


@dataclass(eq=False)
class Compiled:
    """A call runs compiled.

    Attributes
    ----------
    facts
        How that came about.
    executor
        Runs the program.
    run
        Runs a call of it.
    bound
        The tensors that it reads of the module: others, after they have changed.
    specs
        The arguments of the call that it was made for, with a `TensorSpec` for each tensor.
    differentiable
        Grad mode is on and weights require gradients: results lead back to them.
    followed
        Which leaves of the result that holds for; None as long as that is not known.
    served
        How many signatures were seen to lead to it.
    """

    facts: Facts
    executor: Executor
    run: Run
    bound: Bound
    specs: tuple[Args, Kwargs]
    differentiable: bool = False
    followed: list[bool] | None = None
    served: int = 1

    reason: ClassVar[None] = None

    def __post_init__(self) -> None:
        is_plain = type(self.run) is Call and not self.differentiable
        #: What returns the result of the call itself, from its leaves alone.
        self.plain_run = self.run if is_plain else None

    def bind(self, module: ModuleState) -> None:
        """Run with the present weights from now on."""
        self.bound = module.bind(self.executor)

    def gpu_of(self, leaves: Args) -> int | None:
        """Return the index of the GPU on which the tensors of a call are; None for the CPU."""
        tensors = (
            x for x in (*leaves, *self.bound.tensors.values()) if isinstance(x, torch.Tensor)
        )
        return next((x.get_device() for x in tensors if x.is_cuda), None)

    def follow(self, leaves: Args, eager: Callable[[], Any]) -> list[bool] | None:
        """Return which leaves of the result have gradients, as far as that can be found out."""
        if self.executor.artifact.writes:
            return None  # nothing may be written twice
        try:
            return followed_leaves(eager, self.gpu_of(leaves))
        except Exception:  # of any kind: the call itself will raise it again
            return None

    def refused(self, leaves: Args) -> Eager | None:
        """Return why compiled code leaves a call to eager; None if it failed, as eager will."""
        obstacle = self.run.obstacle(leaves)
        if obstacle is None:
            return None
        next_step = "Give it memory of its own: clone it before the call."
        return Eager(self.facts, NotCompiled(obstacle, next_step))

    def failed(self) -> Eager:
        """Return why a call ran in eager, which did not raise as compiled code did."""
        reason = NotCompiled(
            "compiled code raised an error where eager PyTorch does not",
            "Please report it, with the module and the shapes of its arguments.",
        )
        return Eager(self.facts, reason)

    def with_gradients(self, result: Any, eager: Callable[[], Any], leaves: Args) -> Any:
        """Return the result of a call so that its gradients lead back, through eager PyTorch."""
        if self.followed is None:
            self.followed = self.follow(leaves, eager)
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        outputs = self.executor.artifact.outputs
        return attach(result, eager, inputs, [*self.bound.tensors.values()], outputs, self.followed)

    def example(self) -> tuple[Args, Kwargs]:
        """Return arguments of a call of this signature, with tensors of zeros."""
        return _example(self.specs)


@dataclass(eq=False)
class Partitioned:
    """A call runs in Python or TorchScript, and parts of it compiled.

    Attributes
    ----------
    parts
        Runs it.
    facts, bound, specs, differentiable
        As for `Compiled`.
    """

    facts: Facts
    parts: Parts
    bound: Bound
    specs: tuple[Args, Kwargs]
    differentiable: bool = False

    reason: ClassVar[None] = None

    def bind(self, module: ModuleState) -> None:
        """Run with the present weights from now on."""
        self.bound = module.bind_parts(self.parts)

    def with_gradients(self, result: Any, eager: Callable[[], Any], leaves: Args) -> Any:
        """Return the result of a call so that its gradients lead back, through eager PyTorch."""
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return attach(result, eager, inputs, [*self.bound.tensors.values()], None)

    def example(self) -> tuple[Args, Kwargs]:
        """Return arguments of a call of this signature, with tensors of zeros."""
        return _example(self.specs)


Outcome: TypeAlias = Compiled | Partitioned | Eager


def _example(specs: tuple[Args, Kwargs]) -> tuple[Args, Kwargs]:
    return map_only(TensorSpec, TensorSpec.example, specs)


def _why_undescribed(args: Args, kwargs: Kwargs) -> NotCompiled | Choice:
    leaves = pytree.tree_leaves((args, kwargs))
    if is_being_transformed() or any(isinstance(x, fx.Proxy) for x in leaves):
        return Choice.TRANSFORMED
    if forward_ad._current_level >= 0:
        return NotCompiled(
            "forward-mode differentiation is on",
            "Leave torch.autograd.forward_ad.dual_level() for calls that need no tangents.",
        )
    try:
        Signature.of(args, kwargs)
    except NotCompiled as reason:
        return reason
    return Choice.UNDESCRIBED
