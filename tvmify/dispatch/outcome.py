"""How calls of a signature run: compiled, by compiled parts, or in eager PyTorch."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from tvmify.artifact.shapes import Shapes
from tvmify.cache import Key
from tvmify.dispatch.module_state import Bound, ModuleState
from tvmify.dispatch.parts import Parts
from tvmify.dispatch.programs import Captured, Source
from tvmify.dispatch.verdict import Verdict
from tvmify.errors import Divisible, NotCompiled, headline
from tvmify.runtime import (
    Call,
    Executor,
    attach,
    followed_leaves,
    is_capturing,
)
from tvmify.signature import Args, Kwargs, TensorSpec, map_only


class Run(Protocol):
    """Runs a program."""

    def __call__(self, leaves: Args, /) -> Any:
        """Return the result of a call, given the leaves of its arguments."""

    def obstacle(self, leaves: Args, /) -> str | None:
        """Return why the program cannot take these leaves; None if it can."""


class Choice(enum.Enum):
    """Why a call runs in eager PyTorch although it could run compiled."""

    DISABLED = "TVMIFY_DISABLE is set"
    FASTER = "eager PyTorch is faster here"
    TRANSFORMED = "the call is traced or transformed"
    UNDESCRIBED = "native code cannot describe its arguments"


@dataclass(frozen=True)
class Facts:
    """What `explain` shows about an outcome.

    Attributes
    ----------
    title
        The signature as text.
    captured
        How the program was captured, if it was.
    key, source
        The key of the program, and where its code came from, if there is any.
    writes
        What calls write to, besides their results.
    no_graph
        Why calls cannot be captured as CUDA graphs, if the option is set.
    verdict
        How long compiled code and eager PyTorch take, if they were compared.
    shapes
        Which sizes the program serves, if more than one.
    one_shape
        Why it serves a single shape, although sizes vary.
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
        What is known about it.
    why
        Why it does not compile, or the choice not to use compiled code.
    """

    facts: Facts
    why: NotCompiled | Choice

    specs: ClassVar[None] = None

    @property
    def reason(self) -> NotCompiled | None:
        """Why the call does not compile; None for a choice."""
        return None if isinstance(self.why, Choice) else self.why

    @property
    def parts_may_compile(self) -> bool:
        """Whether parts of the call may run compiled."""
        return self.reason is not None and self.reason.divisible is not Divisible.NOT

    @classmethod
    def because(cls, why: NotCompiled | Choice, title: str) -> Eager:
        """Return the outcome of a call about which only the title is known."""
        return cls(Facts(title), why)

    @classmethod
    def during_graph_capture(cls) -> Eager | None:
        """Return the outcome of a call that would wait for the GPU while a CUDA graph is captured.

        None if this thread captures none.
        """
        if not is_capturing():
            return None
        reason = NotCompiled(
            "a CUDA graph is being captured, and code or weights are not on the GPU yet",
            "Make such a call once before the capture.",
        )
        return cls.because(reason, "in a CUDA graph")


@dataclass(eq=False)
class Compiled:
    """A call runs compiled.

    Attributes
    ----------
    facts
        What is known about it.
    executor
        Holds the program and its packed weights.
    run
        Runs calls.
    bound
        The tensors of the module that it reads; replaced when they change.
    specs
        The arguments of the call that it was made for, with a `TensorSpec` for each tensor.
    differentiable
        Whether results have gradients: grad mode is on, and weights require gradients.
    followed
        Which leaves of the result have gradients; None while that is unknown.
    served
        How many signatures it has served.
    failure
        Why compiled code failed in the last such call; None if it never did.
    """

    facts: Facts
    executor: Executor
    run: Run
    bound: Bound
    specs: tuple[Args, Kwargs]
    differentiable: bool = False
    followed: list[bool] | None = None
    served: int = 1
    failure: NotCompiled | None = None

    reason: ClassVar[None] = None

    def __post_init__(self) -> None:
        is_plain = type(self.run) is Call and not self.differentiable
        #: Returns the result of a call from its leaves, if nothing is left to do after it.
        self.plain_run = self.run if is_plain else None

    def bind(self, module: ModuleState) -> None:
        """Use the current weights from now on."""
        self.bound = module.bind(self.executor)

    def gpu_of(self, leaves: Args) -> int | None:
        """Return the index of the GPU that has the tensors of a call; None for the CPU."""
        tensors = (
            x for x in (*leaves, *self.bound.tensors.values()) if isinstance(x, torch.Tensor)
        )
        return next((x.get_device() for x in tensors if x.is_cuda), None)

    def follow(self, leaves: Args, eager: Callable[[], Any]) -> list[bool] | None:
        """Return which leaves of the result have gradients, or None if that cannot be found out."""
        if self.executor.artifact.writes:
            return None  # a second run would write again
        try:
            return followed_leaves(eager, self.gpu_of(leaves))
        except Exception:  # of any kind: the call raises it again
            return None

    def refused(self, leaves: Args) -> Eager | None:
        """Return the outcome of a call that compiled code refused; None if it failed instead."""
        obstacle = self.run.obstacle(leaves)
        if obstacle is None:
            return None
        next_step = "Clone it before the call, so that it has its own memory."
        return Eager(self.facts, NotCompiled(obstacle, next_step))

    def failed(self, message: str) -> Eager:
        """Return the outcome of a call in which compiled code failed and eager PyTorch did not.

        Parameters
        ----------
        message
            Of the error; empty if it is not known.
        """
        cause = f": {headline(message)}" if message.strip() else ""
        self.failure = NotCompiled(
            f"compiled code raised an error where eager PyTorch does not{cause}",
            "Please report it, with the module and the shapes of its arguments.",
        )
        return Eager(self.facts, self.failure)

    def with_gradients(self, result: Any, eager: Callable[[], Any], leaves: Args) -> Any:
        """Attach a backward to the result of a call, which runs in eager PyTorch."""
        if self.followed is None:
            self.followed = self.follow(leaves, eager)
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        outputs = self.executor.artifact.outputs
        return attach(result, eager, inputs, [*self.bound.tensors.values()], outputs, self.followed)


@dataclass(eq=False)
class Partitioned:
    """Parts of a call run compiled, and the rest in Python or TorchScript.

    Attributes
    ----------
    parts
        Runs calls.
    facts, bound, differentiable
        As for `Compiled`.
    specs
        As for `Compiled`; None if the arguments have no signature.
    """

    facts: Facts
    parts: Parts
    bound: Bound
    specs: tuple[Args, Kwargs] | None
    differentiable: bool = False

    reason: ClassVar[None] = None

    def bind(self, module: ModuleState) -> None:
        """Use the current weights from now on."""
        self.bound = module.bind_parts(self.parts)

    def with_gradients(self, result: Any, eager: Callable[[], Any], leaves: Args) -> Any:
        """Attach a backward to the result of a call, which runs in eager PyTorch."""
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return attach(result, eager, inputs, [*self.bound.tensors.values()], None)


Outcome: TypeAlias = Compiled | Partitioned | Eager


def example(specs: tuple[Args, Kwargs]) -> tuple[Args, Kwargs]:
    """Return arguments of a call, with tensors of zeros."""
    return map_only(TensorSpec, TensorSpec.example, specs)
