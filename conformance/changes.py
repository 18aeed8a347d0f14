"""Events in random sequences that change a module."""

from __future__ import annotations

import copy
import pickle
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.utils import parametrize

from conformance.events import Side, argument, dtype, elements, event
from conformance.stateful import Attributed, Branching, Containers, Normalized, Options

# ---------------------------------------------------------------------------------------- weights


def _weight(side: Side, chance: Random) -> tuple[str, nn.Parameter]:
    return chance.choice(sorted(side.module.named_parameters(), key=lambda named: named[0]))


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that owns a weight or layer, and its name there."""
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


@event
def write_weight(side: Side, chance: Random) -> None:
    """Write a weight in place."""
    side.pending = []  # its backward would see the new weight: docs/differences.md
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
    """Replace a parameter by another one."""
    name, weight = _weight(side, chance)
    owner, last = _owner(side.module, name)
    values = elements(chance, *weight.shape).to(weight.dtype)
    setattr(owner, last, nn.Parameter(values, weight.requires_grad))


@event
def tie_weights(side: Side, chance: Random) -> None:
    """Share a weight between two submodules."""
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
    """Run one step of an optimizer."""
    side.pending = []
    optimizer = torch.optim.SGD(side.module.parameters(), lr=0.01)
    optimizer.step()
    if chance.random() < 0.5:
        optimizer.zero_grad(set_to_none=chance.random() < 0.5)


@event
def need_gradients(side: Side, chance: Random) -> None:
    """Freeze or unfreeze a weight, or all of them."""
    if isinstance(side.module, Branching):
        return  # eager follows the taken branch only: docs/differences.md
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
    """Convert the weights to another dtype."""
    if isinstance(side.module, Containers):
        return  # layers in a plain list would keep their dtype
    kind = chance.choice(["float", "float", "double", "half", "bfloat16"])
    side.is_rounded |= kind in ("half", "bfloat16")
    getattr(side.module, kind)()


@event
def parametrize_weight(side: Side, chance: Random) -> None:
    """Parametrize a weight, or remove the parametrization."""
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
    """Switch the module, or a submodule, to training or evaluation."""
    modules = list(side.module.modules())
    module = chance.choice(modules) if chance.random() < 0.3 else side.module
    module.train(chance.random() < 0.3)


@event
def replace_submodule(side: Side, chance: Random) -> None:
    """Replace a layer by another one."""
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
    """Assign an attribute, or edit a collection in one."""
    side.pending = []  # its backward would see the new value: docs/differences.md
    module: Any = side.module
    match module:
        case Options():
            kind = chance.randrange(4)
            if kind == 0:
                module.scale = chance.choice([1.5, 2.0, 3, 0])
            elif kind == 1:
                module.residual = not module.residual
            elif kind == 2:
                module.settings["shift"] = chance.choice([0.5, 0.25, 1])
            else:
                module.settings["square"] = not module.settings["square"]
        case Containers():
            kind = chance.randrange(3)
            if kind == 0:
                module.plain[1] = chance.choice([nn.SiLU, nn.ReLU])()
            elif kind == 1:
                module.named["act"] = chance.choice([nn.GELU, nn.Sigmoid])()
            elif len(module.several) < 4:
                module.several.append(module.several[0])
            else:
                del module.several[0]
        case Normalized():
            module.norm.eps = chance.choice([1e-5, 1e-1])
            module.norm.momentum = chance.choice([0.1, 0.5, None])
        case Attributed():
            module.calls = chance.choice([0, 0.5])


@event
def add_hook(side: Side, chance: Random) -> None:
    """Add a hook to a module or a weight."""
    side.pending = []  # its backward would run the new hook: docs/differences.md
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
    """Continue with a copy of the module."""
    remove_hooks(side, chance)
    side.others = [side.module, *side.others][:2]
    kind = chance.randrange(3)
    if kind == 0:
        side.module = copy.deepcopy(side.module)
    elif kind == 1:
        side.module = copy.copy(side.module)
    elif any(map(parametrize.is_parametrized, side.module.modules())):
        side.module = copy.deepcopy(side.module)  # PyTorch refuses to pickle these
    else:
        side.module = pickle.loads(pickle.dumps(side.module))  # noqa: S301 - written here


@event
def switch_module(side: Side, chance: Random) -> None:
    """Continue with an earlier module."""
    if side.others:
        other = side.others.pop()
        side.others.insert(0, side.module)
        side.module = other


# ----------------------------------------------------------------------------- tensors of the user


@event
def write_kept(side: Side, chance: Random) -> None:
    """Write to a tensor of an earlier call in place."""
    kept = side.kept_tensors()
    if kept:
        # Detached, since autograd refuses writes to one of several views.
        chance.choice(kept).detach().add_(1)


@event
def refresh(side: Side, chance: Random) -> None:
    """Refresh the decorated module."""
    if side.is_decorated:
        side.module.refresh()


@event
def warm_up(side: Side, chance: Random) -> None:
    """Compile for one shape, or for all batches, ahead of time."""
    x, of_any_batch = argument(side, chance), chance.random() < 0.5
    if side.is_decorated:
        shape = (Dim("batch", max=4), *x.shape[1:])
        with torch.no_grad():
            side.module.warmup([shape if of_any_batch else x], dtype=x.dtype)
