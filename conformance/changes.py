"""What may happen to a module between two calls."""

from __future__ import annotations

import copy
import pickle
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from conformance.events import Side, argument, dtype, elements, event

# ---------------------------------------------------------------------------------------- weights


def _weight(side: Side, chance: Random) -> tuple[str, nn.Parameter]:
    return chance.choice(sorted(side.module.named_parameters(), key=lambda named: named[0]))


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


@event
def write_weight(side: Side, chance: Random) -> None:
    """Write a weight in place."""
    side.pending = []  # see docs/differences.md
    _, weight = _weight(side, chance)
    values = elements(chance, *weight.shape).to(weight.dtype)
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
            buffer.copy_(elements(chance, *buffer.shape).abs() + 1)


@event
def replace_weight(side: Side, chance: Random) -> None:
    """Put another parameter in the place of one."""
    name, weight = _weight(side, chance)
    owner, last = _owner(side.module, name)
    values = elements(chance, *weight.shape).to(weight.dtype)
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
    side.pending = []
    state = {
        name: (elements(chance, *tensor.shape).abs() + 0.5).to(tensor.dtype)
        for name, tensor in side.module.state_dict().items()
    }
    side.module.load_state_dict(state, assign=chance.random() < 0.5)


@event
def step(side: Side, chance: Random) -> None:
    """Let an optimizer step."""
    side.pending = []
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
            weight.data = elements(chance, *weight.shape)
        new.to(dtype(side.module))
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
    x = argument(side, chance)
    if side.is_decorated:
        with torch.no_grad():
            side.module.warmup([x])
