"""A twin shares tensors with its module, but nothing else that either could change."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tvmify import TvmifyWarning, tvmify
from tvmify.capture import capture
from tvmify.capture.twin import changed_attribute, twin


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.same = self.linear
        self.act = self.double
        self.items = [1, 2]
        self.flag = False
        self.register_buffer("buffer", torch.rand(3))

    def double(self, x: Tensor) -> Tensor:
        return self.linear(x) * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) + self.buffer


def test_a_twin_computes_the_same_with_the_same_tensors() -> None:
    module, x = Net(), torch.rand(2, 3)
    copy = twin(module)
    assert torch.equal(copy(x), module(x))
    for (name, ours), (other, theirs) in zip(
        copy.named_parameters(), module.named_parameters(), strict=True
    ):
        assert name == other
        assert ours is theirs
    assert copy.buffer is module.buffer


def test_a_twin_is_a_tree_of_its_own() -> None:
    module = Net()
    copy = twin(module)
    assert isinstance(copy, Net)
    assert copy.linear is not module.linear
    assert copy.linear is copy.same
    assert copy.act.__self__ is copy
    copy.linear.weight = nn.Parameter(torch.zeros(3, 3))
    copy.items.append(3)
    copy.flag = True
    assert module.linear.weight.any()
    assert module.items == [1, 2]
    assert not module.flag


def test_fx_generated_modules() -> None:
    graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    x = torch.rand(2, 3)
    assert torch.equal(twin(graph_module)(x), graph_module(x))


def test_a_script_module_inside_is_kept() -> None:
    scripted = torch.jit.script(nn.Linear(3, 3))
    assert twin(nn.Sequential(scripted)).get_submodule("0") is scripted


def test_changes_are_named() -> None:
    module = Net()
    copy = twin(module)
    copy(torch.rand(2, 3))
    assert changed_attribute(copy, module) is None
    setattr(copy.linear, "flag", 1)  # noqa: B010
    assert changed_attribute(copy, module) == "linear.flag"
    copy = twin(module)
    assert isinstance(copy, Net)
    copy.items.append(3)
    assert changed_attribute(copy, module) == "items"
    copy = twin(module)
    copy.register_buffer("more", torch.zeros(1))
    assert changed_attribute(copy, module) == "_buffers"


class Recording(nn.Module):
    """Installs hooks in the first forward that needs them, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        if not hasattr(self, "_output_capturing_hooks_installed"):
            for layer in self.layers:
                layer.register_forward_hook(lambda _, __, output: found.append(output))
            self._output_capturing_hooks_installed = True
        self.layers(x)
        return found


def test_hooks_passing_outputs_on_are_recorded() -> None:
    module = Recording()
    program = capture(module, (torch.rand(2, 3),), {})
    assert not hasattr(module, "_output_capturing_hooks_installed")
    assert not module.layers[0]._forward_hooks
    x = torch.rand(2, 3)
    for ours, eager in zip(program.export((x,), {}).module()(x), module(x), strict=True):
        torch.testing.assert_close(ours, eager)


class Named(nn.Module):
    """Depends on the name of its class, as models of transformers do."""

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return x * KNOWN.get(str(type(self)), 0)


KNOWN = {str(Named): 3}


def test_recorded_module_keeps_its_class_name() -> None:
    x = torch.rand(2, 3)
    program = capture(Named(), (x,), {})
    assert program.method == "export"
    assert torch.equal(program.export((x,), {}).module()(x), x * 3)


class Detector(nn.Module):
    """Has an attribute in both instance and class, like ``anchors`` in YOLO's heads."""

    anchors = torch.empty(0)

    def forward(self, x, *rest):  # TorchScript refuses star arguments
        if self.anchors.shape != x.shape:
            self.anchors = torch.ones_like(x) * 2
        return x * self.anchors


def test_a_tensor_attribute_may_hide_one_of_the_class() -> None:
    net = Detector().eval()
    fast: Any = tvmify(net, cache=False)
    x = torch.arange(3.0)
    with pytest.warns(TvmifyWarning, match="forward sets the attribute anchors"):
        assert torch.equal(fast(x), x * 2)
    assert torch.equal(fast(x + 1), (x + 1) * 2)
    fast.anchors = torch.full((3,), 5.0)
    assert torch.equal(fast(x), x * 5)
    assert (fast.cache_info().builds, fast.cache_info().eager) == (1, 1)
