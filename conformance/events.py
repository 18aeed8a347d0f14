"""What may happen to a module between two calls, and the calls."""

from __future__ import annotations

import contextlib
import copy
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
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

    module: nn.Module
    is_decorated: bool
    others: list[nn.Module] = field(default_factory=list)
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


def _elements(chance: Random, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(chance.randrange(1000))
    return torch.randint(-8, 9, shape, generator=generator) / 4


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def _argument(side: Side, chance: Random) -> Tensor:
    """Make a tensor that lies in memory in any way."""
    batch, length = chance.choice([1, 2, 2, 3]), chance.choice([1, 3, 3, 5])
    x = _elements(chance, batch, length, WIDTH).to(_dtype(side.module))
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
        options["mask"] = _elements(chance, *x.shape) > 0
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
    x = _argument(side, chance)
    options = _options(side, chance, x)
    with _surroundings(side, chance):
        result = side.module(x, **options)
    side.keep(x, result)
    return result


@event
def call_and_go_backward(side: Side, chance: Random) -> Any:
    """Call it, and add up gradients, sometimes of the argument, too."""
    x = _argument(side, chance).requires_grad_(chance.random() < 0.3)
    result = side.module(x if x.is_leaf and not x.requires_grad else x + 0)
    loss = _sum(result)
    side.keep(x, result)
    if loss is not None:
        loss.backward()
    return result, x.grad, loss is None


@event
def call_and_wait(side: Side, chance: Random) -> Any:
    """Call it for a backward later."""
    result = side.module(_argument(side, chance))
    loss = _sum(result)
    side.pending = [] if loss is None else [loss]
    return result


@event
def go_backward(side: Side, chance: Random) -> None:
    """Go backward from an earlier result."""
    if side.pending:
        side.pending.pop().backward()


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
    arguments = [_argument(side, chance) for _ in range(3)]
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
    x = _argument(side, chance)
    with torch.no_grad():
        weights = {name: weight + 1 for name, weight in side.module.named_parameters()}
        return torch.func.functional_call(side.module, weights, (x,))


@event
def transform(side: Side, chance: Random) -> Any:
    """Call it inside a transform of functions."""
    if side.hooks or not _is_pure(side):
        return None
    x, kind = _argument(side, chance), chance.randrange(3)
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
    x = _argument(side, chance)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        module: Any = side.module
        if side.is_decorated:
            path = Path(folder, "module.pt")
            with contextlib.suppress(tvmify.SaveError):
                tvmify.save(side.module, path, example_inputs=(x.clone(),))
                module = tvmify.load(path)
        torch.manual_seed(0)  # saving draws, too
        return module(x)


# ---------------------------------------------------------------------------------------- weights


def _weight(side: Side, chance: Random) -> tuple[str, nn.Parameter]:
    return chance.choice(sorted(side.module.named_parameters(), key=lambda named: named[0]))


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


@event
def write_weight(side: Side, chance: Random) -> None:
    """Write a weight in place."""
    _, weight = _weight(side, chance)
    values = _elements(chance, *weight.shape).to(weight.dtype)
    kind = chance.randrange(6)
    if kind == 0:
        weight.data = values
    elif kind == 1:
        weight.data.copy_(values)
    elif kind == 2:
        with torch.inference_mode():
            weight.copy_(values)
    elif kind == 3:
        with torch.no_grad():
            weight[0] = values[0]
    elif kind == 4:
        with torch.no_grad():
            weight.detach().add_(1)
    else:
        with torch.no_grad():
            weight.copy_(values)


@event
def write_buffer(side: Side, chance: Random) -> None:
    """Write all buffers in place."""
    with torch.no_grad():
        for buffer in side.module.buffers():
            buffer.copy_(_elements(chance, *buffer.shape).abs() + 1)


@event
def replace_weight(side: Side, chance: Random) -> None:
    """Put another parameter in the place of one."""
    name, weight = _weight(side, chance)
    owner, last = _owner(side.module, name)
    values = _elements(chance, *weight.shape).to(weight.dtype)
    setattr(owner, last, nn.Parameter(values, weight.requires_grad))


@event
def tie_weights(side: Side, chance: Random) -> None:
    """Let two modules share a weight."""
    _, weight = _weight(side, chance)
    others = [n for n, w in side.module.named_parameters() if w.shape == weight.shape]
    owner, last = _owner(side.module, chance.choice(others))
    setattr(owner, last, weight)


@event
def load_weights(side: Side, chance: Random) -> None:
    """Load a state dict."""
    state = {
        name: (_elements(chance, *tensor.shape).abs() + 0.5).to(tensor.dtype)
        for name, tensor in side.module.state_dict().items()
    }
    side.module.load_state_dict(state, assign=chance.random() < 0.5)


@event
def step(side: Side, chance: Random) -> None:
    """Let an optimizer step."""
    optimizer = torch.optim.SGD(side.module.parameters(), lr=0.01)
    optimizer.step()
    if chance.random() < 0.5:
        optimizer.zero_grad(set_to_none=chance.random() < 0.5)


@event
def need_gradients(side: Side, chance: Random) -> None:
    """Freeze a weight, or the opposite, or all."""
    if type(side.module).__name__ == "Branching":
        return  # see docs/differences.md: one branch may have gradients, and the other none
    _, weight = _weight(side, chance)
    kind = chance.randrange(4)
    if kind == 0:
        side.module.requires_grad_(False)
    elif kind == 1:
        side.module.requires_grad_(True)
    else:
        weight.requires_grad_(not weight.requires_grad)


@event
def convert(side: Side, chance: Random) -> None:
    """Give it another dtype."""
    if type(side.module).__name__ == "Containers":
        return  # layers in a plain list keep theirs, and docs/differences.md has mixed products
    side.module.to(chance.choice([torch.float64, torch.float32, torch.float32]))


@event
def parametrize_weight(side: Side, chance: Random) -> None:
    """Compute a weight from another tensor, or no longer."""
    layers = [m for m in side.module.modules() if isinstance(m, nn.Linear)]
    if not layers:
        return
    layer = chance.choice(layers)
    if parametrize.is_parametrized(layer, "weight"):
        parametrize.remove_parametrizations(layer, "weight")
    elif chance.random() < 0.5:
        torch.nn.utils.parametrizations.weight_norm(layer)
    else:
        parametrize.register_parametrization(layer, "weight", nn.Tanh())


# ---------------------------------------------------------------------------------------- modules


@event
def switch_mode(side: Side, chance: Random) -> None:
    """Train or evaluate, all of it or a part."""
    modules = list(side.module.modules())
    module = chance.choice(modules) if chance.random() < 0.3 else side.module
    module.train(chance.random() < 0.3)


@event
def replace_submodule(side: Side, chance: Random) -> None:
    """Put another layer in the place of one."""
    names = [n for n, m in side.module.named_modules() if n and type(m) is nn.Linear]
    if names:
        owner, last = _owner(side.module, chance.choice(names))
        layer: nn.Linear = getattr(owner, last)
        new = nn.Linear(layer.in_features, layer.out_features, chance.random() < 0.5)
        for weight in new.parameters():
            weight.data = _elements(chance, *weight.shape)
        new.to(_dtype(side.module))
        setattr(owner, last, new)


@event
def set_attribute(side: Side, chance: Random) -> None:
    """Assign an attribute, or edit what one holds."""
    side.pending = []  # the backward would see it
    module: Any = side.module
    match type(module).__name__:
        case "Options":
            kind = chance.randrange(4)
            if kind == 0:
                module.scale = chance.choice([1.5, 2.0, 3, 0])
            elif kind == 1:
                module.residual = not module.residual
            elif kind == 2:
                module.settings["shift"] = chance.choice([0.5, 0.25, 1])
            else:
                module.settings["square"] = not module.settings["square"]
        case "Containers":
            kind = chance.randrange(3)
            if kind == 0:
                module.plain[1] = chance.choice([nn.SiLU, nn.ReLU])()
            elif kind == 1:
                module.named["act"] = chance.choice([nn.GELU, nn.Sigmoid])()
            elif len(module.several) < 4:
                module.several.append(module.several[0])
            else:
                del module.several[0]
        case "Normalized":
            module.norm.eps = chance.choice([1e-5, 1e-1])
            module.norm.momentum = chance.choice([0.1, 0.5, None])
        case "Attributed":
            module.calls = chance.choice([0, 0.5])


@event
def add_hook(side: Side, chance: Random) -> None:
    """Add a hook to a module or a weight."""
    side.pending = []  # the backward would run the hooks of modules
    kind, seen = chance.randrange(6), side.seen
    module = chance.choice(list(side.module.modules()))
    _, weight = _weight(side, chance)
    if kind == 0:
        side.hooks.append(module.register_forward_pre_hook(lambda *_: seen.append("before")))
    elif kind == 1:
        side.hooks.append(module.register_forward_hook(lambda *_: seen.append("after")))
    elif kind == 2:
        side.hooks.append(module.register_full_backward_hook(lambda *_: seen.append("backward")))
    elif weight.requires_grad and kind == 3:
        side.hooks.append(weight.register_hook(lambda gradient: gradient * 2))
    elif weight.requires_grad and kind == 4:
        hook = weight.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
        side.hooks.append(hook)
    elif kind == 5:

        def double(_: nn.Module, __: Any, result: Any) -> Any:
            return result * 2 if isinstance(result, Tensor) else None

        side.hooks.append(module.register_forward_hook(double))


@event
def remove_hooks(side: Side, chance: Random) -> None:
    """Remove all hooks."""
    for hook in side.hooks:
        hook.remove()
    side.hooks.clear()


@event
def copy_module(side: Side, chance: Random) -> None:
    """Go on with a copy."""
    remove_hooks(side, chance)
    side.others = [side.module, *side.others][:2]
    kind = chance.randrange(3)
    if kind == 0:
        side.module = copy.deepcopy(side.module)
    elif kind == 1:
        side.module = copy.copy(side.module)
    elif any(map(parametrize.is_parametrized, side.module.modules())):
        side.module = copy.deepcopy(side.module)  # PyTorch does not pickle these
    else:
        side.module = pickle.loads(pickle.dumps(side.module))  # noqa: S301 - written here


@event
def switch_module(side: Side, chance: Random) -> None:
    """Go on with an earlier one."""
    if side.others:
        other = side.others.pop()
        side.others.insert(0, side.module)
        side.module = other


# ----------------------------------------------------------------------------- tensors of the user


@event
def write_kept(side: Side, chance: Random) -> None:
    """Write a tensor of an earlier call in place."""
    leaves = [leaf for leaf in pytree.tree_leaves(side.kept) if isinstance(leaf, Tensor)]
    if leaves:
        chance.choice(leaves).detach().add_(1)  # detached: PyTorch forbids views of several results


@event
def refresh(side: Side, chance: Random) -> None:
    """Forget what was seen of the module."""
    if side.is_decorated:
        side.module.refresh()


@event
def warm_up(side: Side, chance: Random) -> None:
    """Compile a shape ahead of time."""
    x = _argument(side, chance)
    if side.is_decorated:
        with torch.no_grad():
            side.module.warmup([x])
