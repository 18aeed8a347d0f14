"""Events in random sequences: calls here, changes of a module in `conformance.changes`."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tvmify
from conformance.stateful import IMPURE, WIDTH, Options

#: The number of arguments and results that are kept, and compared again after later events.
KEPT = 4


@dataclass
class Side:
    """One of two modules that go through the same events.

    Attributes
    ----------
    module, others
        The module that events act on, and those that it was copied from.
    kept
        Arguments and results of the last calls.
    pending
        Losses for a later backward.
    hooks
        Handles of the hooks of `module`.
    seen
        What hooks recorded.
    is_rounded
        Whether anything has been computed in a half type.
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
        """Keep some values, and drop the oldest ones."""
        self.kept = [*self.kept, *values][-KEPT:]

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a user can see: kept ones, weights and their gradients."""
        found = self.kept_tensors()
        for module in (self.module, *self.others):
            weights = [*module.parameters(), *module.buffers()]
            found += weights
            found += [weight.grad for weight in weights if weight.grad is not None]
        return found

    def kept_tensors(self) -> list[Tensor]:
        """Return the tensors of earlier calls."""
        return [leaf for leaf in pytree.tree_leaves(self.kept) if isinstance(leaf, Tensor)]


#: Acts on one side, with random choices; its result has to be the same for both sides.
Event = Callable[[Side, Random], Any]
EVENTS: dict[str, Event] = {}


def event(function: Event) -> Event:
    """Register an event under the name of its function."""
    EVENTS[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------------ calls


def elements(chance: Random, *shape: int) -> Tensor:
    """Draw multiples of a quarter, whose sums are exact."""
    generator = torch.Generator().manual_seed(chance.randrange(1000))
    return torch.randint(-8, 9, shape, generator=generator) / 4


def dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of the weights."""
    return next(module.parameters()).dtype


def argument(side: Side, chance: Random) -> Tensor:
    """Draw an argument with random strides."""
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
    if not isinstance(side.module, Options) or chance.random() < 0.5:
        return {}
    options: dict[str, Any] = {"factor": chance.choice([1, 2, 3, 1.0, 0.5, True, False])}
    if chance.random() < 0.3:
        options["mask"] = elements(chance, *x.shape) > 0
    return options


@contextlib.contextmanager
def _surroundings(side: Side, chance: Random) -> Iterator[None]:
    """Enter one of PyTorch's modes, or stay in the current one."""
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
    # A plain sum, or a sum of squares, would have zero gradients after a norm.
    sums = [(leaf[..., 0] + leaf.tanh().sum(-1)).sum() for leaf in leaves if leaf.requires_grad]
    return sum(sums[1:], sums[0]) if sums else None


def _is_pure(side: Side) -> bool:
    """Whether calls have no side effects, and draw no random numbers."""
    is_evaluating = not any(module.training for module in side.module.modules())
    return is_evaluating and not isinstance(side.module, IMPURE)


@event
def call(side: Side, chance: Random) -> Any:
    """Call the module in some mode."""
    x = argument(side, chance)
    options = _options(side, chance, x)
    with _surroundings(side, chance):
        result = side.module(x, **options)
    side.keep(x, result)
    return result


@event
def call_in_thread(side: Side, chance: Random) -> Any:
    """Call the module in a new thread, which has PyTorch's default modes."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, side, chance).result()


@event
def call_again(side: Side, chance: Random) -> Any:
    """Call the module with an argument or a result of an earlier call."""
    kept = [tensor for tensor in side.kept_tensors() if tensor.shape[2:] == (WIDTH,)]
    if not kept:
        return None
    with _surroundings(side, chance):
        result = side.module(chance.choice(kept))
    side.keep(result)
    return result


@event
def call_and_go_backward(side: Side, chance: Random) -> Any:
    """Call the module, and accumulate gradients, sometimes of the argument, too."""
    x = argument(side, chance).requires_grad_(chance.random() < 0.3)
    result = side.module(x if x.is_leaf and not x.requires_grad else x + 0)
    loss = _sum(result)
    side.keep(x, result)
    if loss is not None:
        loss.backward()
    return result, x.grad, loss is None


@event
def call_and_wait(side: Side, chance: Random) -> Any:
    """Call the module, and leave the backward pass to a later event."""
    result = side.module(argument(side, chance))
    loss = _sum(result)
    side.pending = [] if loss is None else [loss]
    return result


@event
def go_backward(side: Side, chance: Random) -> None:
    """Run the backward pass of an earlier call."""
    try:
        if side.pending:
            side.pending.pop().backward()
    except RuntimeError:
        for module in (side.module, *side.others):
            module.zero_grad()  # it is undefined which gradients a failed backward has written
        raise


@event
def call_wrongly(side: Side, chance: Random) -> Any:
    """Call the module with an argument of a wrong shape or type."""
    wrong = [torch.ones(2, 3, WIDTH + 1), torch.ones(()), torch.ones(2, 3), None]
    with torch.no_grad():
        return side.module(chance.choice(wrong))


@event
def call_from_threads(side: Side, chance: Random) -> Any:
    """Call the module from several threads at once."""
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
    """Call the module with other weights, by `functional_call`."""
    x = argument(side, chance)
    with torch.no_grad():
        weights = {name: weight + 1 for name, weight in side.module.named_parameters()}
        return torch.func.functional_call(side.module, weights, (x,))


@event
def transform(side: Side, chance: Random) -> Any:
    """Call the module inside a transform of `torch.func`."""
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
    """Save the module to a file, load it, and call the loaded one."""
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
        torch.manual_seed(0)  # saving draws random numbers
        return module(x)
