"""Changes of a module, and a check that the next call sees them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight, self.bias) * 3


class Layer(nn.Linear):
    """A separate class, so that tests may replace its methods."""

    def scale(self) -> float:
        return 2.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight, self.bias) * self.scale()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(Layer(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.offset


def weight(*shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(1)
    return nn.Parameter(torch.randn(shape, generator=generator))


def replace_class(net: Any) -> None:
    net.layers[2].__class__ = Scaled


def replace_forward_of_a_class(net: Any) -> Callable[[], None]:
    before = Layer.forward
    Layer.forward = lambda self, input: before(self, input) - 1
    return lambda: setattr(Layer, "forward", before)


def replace_a_method_of_a_class(net: Any) -> Callable[[], None]:
    before = Layer.scale
    Layer.scale = lambda self: 5.0
    return lambda: setattr(Layer, "scale", before)


def add_a_method_to_a_class(net: Any) -> Callable[[], None]:
    Layer.extra_repr = lambda self: ""  # type: ignore[method-assign]
    Layer.__call__ = lambda self, x: nn.Linear.__call__(self, x) * 2  # type: ignore[method-assign]

    def undo() -> None:
        del Layer.extra_repr, Layer.__call__

    return undo


def set_forward(net: Any) -> None:
    net.layers[2].forward = lambda x: x * 7


def bind_a_forward(net: Any) -> None:
    def doubled(self: Any, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight, self.bias) * 2

    net.layers[3].forward = MethodType(doubled, net.layers[3])


def replace_a_method_of_an_object(net: Any) -> None:
    net.layers[0].scale = lambda: 5.0


def add_a_hook(net: Any) -> None:
    net.layers[2].register_forward_hook(lambda *_: _[2] * 2, prepend=True)


def add_a_hook_with_keywords(net: Any) -> None:
    net.layers[2].register_forward_pre_hook(lambda m, a, k: ((a[0] * 2,), k), with_kwargs=True)


def replace_the_hooks(net: Any) -> None:
    hooks = type(net.layers[2]._forward_hooks)()
    hooks[0] = lambda module, args, result: result * 2
    net.layers[2]._forward_hooks = hooks


def hook_everything(net: Any) -> Callable[[], None]:
    hook = nn.modules.module.register_module_forward_hook(lambda m, a, r: r * 2)
    return hook.remove


def hook_everything_before(net: Any) -> Callable[[], None]:
    hook = nn.modules.module.register_module_forward_pre_hook(lambda m, a: (a[0] + 1,))
    return hook.remove


def reorder(net: Any) -> None:
    modules = net.layers._modules
    modules["2"], modules["3"] = modules["3"], modules["2"]


def reorder_the_same_names(net: Any) -> None:
    modules = net.layers._modules
    modules["0"] = modules.pop("0")


def hide_a_module(net: Any) -> None:
    net.__dict__["layers"] = nn.Linear(4, 4).requires_grad_(False)


def hide_a_parameter(net: Any) -> None:
    net.layers[2].__dict__["weight"] = weight(4, 4).detach()


def hide_a_buffer(net: Any) -> None:
    object.__setattr__(net, "offset", torch.full((4,), 9.0))


def parametrize_a_weight(net: Any) -> None:
    parametrizations.weight_norm(net.layers[2])
    net.layers[2].parametrizations.weight.original0.mul_(2)


def prune_a_weight(net: Any) -> None:
    prune.l1_unstructured(net.layers[2], "weight", 0.5)


def prune_for_good(net: Any) -> None:
    prune.l1_unstructured(net.layers[2], "weight", 0.5)
    prune.remove(net.layers[2], "weight")


def normalise_in_the_old_way(net: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(net.layers[2])
    net.layers[2].weight_g.mul_(3)


def normalise_the_spectrum(net: Any) -> None:
    nn.utils.spectral_norm(net.layers[2])


def freeze(net: Any) -> None:
    net.requires_grad_(False)
    net.layers[2].weight.mul_(2)


def tie(net: Any) -> None:
    net.layers[2].weight = net.layers[3].weight


def replace_memory(net: Any) -> None:
    net.layers[2].weight.data = weight(4, 4).data


def write_in_inference_mode(net: Any) -> None:
    with torch.inference_mode():
        net.layers[2].weight[1, 2] = 9


CHANGES = [
    replace_class,
    replace_forward_of_a_class,
    replace_a_method_of_a_class,
    add_a_method_to_a_class,
    set_forward,
    bind_a_forward,
    replace_a_method_of_an_object,
    add_a_hook,
    add_a_hook_with_keywords,
    replace_the_hooks,
    hook_everything,
    hook_everything_before,
    reorder,
    reorder_the_same_names,
    hide_a_module,
    hide_a_parameter,
    hide_a_buffer,
    parametrize_a_weight,
    prune_a_weight,
    prune_for_good,
    normalise_in_the_old_way,
    normalise_the_spectrum,
    freeze,
    tie,
    replace_memory,
    write_in_inference_mode,
]


def check(fast: Any, plain: Any, *args: Any) -> torch.Tensor:
    expected, actual = plain(*args), fast(*args)
    torch.testing.assert_close(actual, expected)
    return expected
