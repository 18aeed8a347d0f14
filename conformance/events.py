"""Events that may happen to a module: here its calls, in `conformance.changes` all else."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tvmify
from conformance.stateful import IMPURE, WIDTH

#: So many results and arguments are kept, to be looked at after later events.
KEPT = 4


@dataclass
class Side:
    """One of two modules that the same happens to.

    Attributes
    ----------
    module
        The current one; `others` are those that it was copied from, and the like.
    kept
        Arguments and results of the last calls.
    pending
        Sums of results, for a backward later.
    hooks
        Those that may be removed.
    seen
        What hooks noticed.
    is_rounded
        Whether a call computed in bfloat16, whatever the dtype of its results.
    """

    module: Any
    is_decorated: bool
    others: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    pending: list[Tensor] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    is_rounded: bool = False

    def keep(self, *values: Any) -> None:
        """Keep them, and forget the oldest."""
        self.kept = [*self.kept, *values][-KEPT:]

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a user may look at: kept ones, weights, their gradients."""
        found = [leaf for leaf in pytree.tree_leaves(self.kept) if isinstance(leaf, Tensor)]
        for module in (self.module, *self.others):
            weights = [*module.parameters(), *module.buffers()]
            found += weights
            found += [weight.grad for weight in weights if weight.grad is not None]
        return found


#: Changes one side, as chance decides; returns what the other side has to return as well.
Event = Callable[[Side, Random], Any]
EVENTS: dict[str, Event] = {}


def event(function: Event) -> Event:
    """Let it happen in sequences."""
    EVENTS[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------------ calls


def elements(chance: Random, *shape: int) -> Tensor:
    """Draw multiples of a quarter."""
    generator = torch.Generator().manual_seed(chance.randrange(1000))
    return torch.randint(-8, 9, shape, generator=generator) / 4


def dtype(module: nn.Module) -> torch.dtype:
    """Return that of the weights."""
    return next(module.parameters()).dtype


def argument(side: Side, chance: Random) -> Tensor:
    """Make a tensor that lies in memory in any way."""
    batch, length = chance.choice([1, 2, 2, 3]), chance.choice([1, 3, 3, 5])
    x = elements(chance, batch, length, WIDTH).to(dtype(side.module))
    layout = chance.randrange(6)
    if layout == 0:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == 1:
        return torch.cat([x, x + 1], 2)[..., 1 : 1 + WIDTH]
    if layout == 2:
        return x[:1].expand(batch, length, WIDTH)
    return x


def _options(side: Side, chance: Random, x: Tensor) -> dict[str, Any]:
    if type(side.module).__name__ != "Options" or chance.random() < 0.5:
        return {}
    options: dict[str, Any] = {"factor": chance.choice([1, 2, 3, 1.0, 0.5, True, False])}
    if chance.random() < 0.3:
        options["mask"] = elements(chance, *x.shape) > 0
    return options


@contextlib.contextmanager
def _surroundings(side: Side, chance: Random) -> Iterator[None]:
    kind = chance.randrange(8)
    if kind < 3:
        with torch.no_grad():
            yield
    elif kind == 3:
        with torch.inference_mode():
            yield
    elif kind == 4:
        side.is_rounded = True
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            yield
    else:
        yield


def _sum(result: Any) -> Tensor | None:
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    # Weighted: a norm makes the gradient of a plain sum, or one of squares, vanish.
    sums = [(leaf[..., 0] + leaf.tanh().sum(-1)).sum() for leaf in leaves if leaf.requires_grad]
    return sum(sums[1:], sums[0]) if sums else None


def _is_pure(side: Side) -> bool:
    """Whether calls depend on nothing that calls write, nor on the random generator."""
    is_evaluating = not any(module.training for module in side.module.modules())
    return is_evaluating and type(side.module).__name__ not in IMPURE


@event
def call(side: Side, chance: Random) -> Any:
    """Call it in some mode."""
    x = argument(side, chance)
    options = _options(side, chance, x)
    with _surroundings(side, chance):
        result = side.module(x, **options)
    side.keep(x, result)
    return result


@event
def call_and_go_backward(side: Side, chance: Random) -> Any:
    """Call it, and add up gradients, sometimes of the argument, too."""
    x = argument(side, chance).requires_grad_(chance.random() < 0.3)
    result = side.module(x if x.is_leaf and not x.requires_grad else x + 0)
    loss = _sum(result)
    side.keep(x, result)
    if loss is not None:
        loss.backward()
    return result, x.grad, loss is None


@event
def call_and_wait(side: Side, chance: Random) -> Any:
    """Call it for a backward later."""
    result = side.module(argument(side, chance))
    loss = _sum(result)
    side.pending = [] if loss is None else [loss]
    return result


@event
def go_backward(side: Side, chance: Random) -> None:
    """Go backward from an earlier result."""
    try:
        if side.pending:
            side.pending.pop().backward()
    except RuntimeError:
        for module in (side.module, *side.others):
            module.zero_grad()  # how far it went, nobody is promised
        raise


@event
def call_wrongly(side: Side, chance: Random) -> Any:
    """Call it with what it does not take."""
    wrong = [torch.ones(2, 3, WIDTH + 1), torch.ones(()), torch.ones(2, 3), None]
    with torch.no_grad():
        return side.module(chance.choice(wrong))


@event
def call_from_threads(side: Side, chance: Random) -> Any:
    """Call it from several threads at a time."""
    if side.hooks or not _is_pure(side):
        return None
    arguments = [argument(side, chance) for _ in range(3)]
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        with torch.no_grad():
            results[number] = [side.module(arguments[number].clone()) for _ in range(2)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results.get(number) for number in range(3)]


@event
def call_with_other_weights(side: Side, chance: Random) -> Any:
    """Call it with weights that it does not have."""
    x = argument(side, chance)
    with torch.no_grad():
        weights = {name: weight + 1 for name, weight in side.module.named_parameters()}
        return torch.func.functional_call(side.module, weights, (x,))


@event
def transform(side: Side, chance: Random) -> Any:
    """Call it inside a transform of functions."""
    if side.hooks or not _is_pure(side):
        return None
    x, kind = argument(side, chance), chance.randrange(3)
    if kind == 0:
        return torch.func.vmap(side.module)(torch.stack([x, x + 1]))
    if kind == 1:
        return torch.func.jvp(side.module, (x,), (torch.ones_like(x),))
    return torch.func.grad(lambda x: pytree.tree_leaves(side.module(x))[0].sum())(x)


@event
def save_and_load(side: Side, chance: Random) -> Any:
    """Call what a file holds."""
    if side.hooks or not _is_pure(side):
        return None
    x = argument(side, chance)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        module: Any = side.module
        if side.is_decorated:
            path = Path(folder, "module.pt")
            with contextlib.suppress(tvmify.SaveError):
                tvmify.save(side.module, path, example_inputs=(x.clone(),))
                module = tvmify.load(path)
        torch.manual_seed(0)  # saving draws, too
        return module(x)
