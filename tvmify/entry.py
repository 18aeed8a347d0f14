"""What the dispatcher keeps for a signature, and for a state of its module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmify.capture import Program
from tvmify.driving import Driven
from tvmify.errors import NotCompiled
from tvmify.options import CompileOptions
from tvmify.runtime import Executor, PackedWeights
from tvmify.signature import TensorSpec
from tvmify.verdict import judge


@dataclass
class Entry:
    """What a signature leads to: an executor, or the reason why there is none."""

    signature: str
    run: Callable[[tuple[Any, ...]], Any] | None = None
    reason: NotCompiled | None = None
    executor: Executor | None = None
    #: Runs the call by regions, where it cannot be one program.
    driven: Driven | None = None
    #: The packed weights that the executor was bound to, and the tensors they were made of.
    weights: PackedWeights | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    #: Grad mode is on and weights require gradients: results lead back to them.
    differentiable: bool = False
    #: What a person may ask about: how it was captured, where the code came from.
    notes: dict[str, str] = field(default_factory=dict)
    _call: tuple[Any, Any] = ((), {})  # with a `TensorSpec` for each tensor

    def remember(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what `example` makes arguments of."""
        self._call = pytree.tree_map_only(torch.Tensor, TensorSpec.of, (args, kwargs))

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of a call of this signature, with tensors of zeros."""
        return pytree.tree_map_only(TensorSpec, TensorSpec.example, self._call)

    def judge(
        self,
        options: CompileOptions,
        eager: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """Leave to eager PyTorch what it computes faster; return whether that is news."""
        executor, run = self.executor, self.run
        if executor is None or run is None or not options.compares():
            return False
        leaves = tuple(pytree.tree_leaves((args, kwargs)))
        verdict, is_new = judge(executor.artifact.verdicts, lambda: run(leaves), eager)
        if verdict is not None:
            self.notes["compared"] = str(verdict)
            if not verdict.is_for_compiled:
                self.run = self.executor = None
        return is_new


@dataclass
class State:
    """One state of the module (see `tvmify.runtime.watch`), and what it was captured as."""

    number: int
    scripted: Program | None = None
    #: Runs it by regions, where it cannot be one program.
    driven: Driven | None = None
