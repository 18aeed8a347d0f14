"""The scale of a batch norm is folded into the weights; product and activation are one kernel."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tvm import relax

from tests.compiler.programs import as_module, check, compiled, executed, target
from tests.models import trained
from tests.tolerances import assert_close_to_reference
from tvmify import tvmify as decorate
from tvmify.compiler import pipeline
from tvmify.compiler.frontend.decompositions import decompose
from tvmify.compiler.frontend.importer import import_program

LINE, IMAGE, VOLUME = (2, 8, 20), (2, 8, 9, 9), (2, 8, 4, 5, 6)
LAYERS = {
    "linear": (nn.Linear(8, 16), nn.BatchNorm1d(16), (4, 8)),
    "linear without bias": (nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), (4, 8)),
    "line": (nn.Conv1d(8, 16, 3, padding=1), nn.BatchNorm1d(16), LINE),
    "line in groups": (nn.Conv1d(8, 16, 3, groups=2, bias=False), nn.BatchNorm1d(16), LINE),
    "image in groups": (nn.Conv2d(8, 16, 3, groups=2), nn.BatchNorm2d(16), IMAGE),
    "volume": (nn.Conv3d(8, 16, 3, padding=1), nn.BatchNorm3d(16), VOLUME),
    "volume in groups": (nn.Conv3d(8, 16, 2, groups=2), nn.BatchNorm3d(16), VOLUME),
    "transposed line": (nn.ConvTranspose1d(8, 16, 4, 2, 1), nn.BatchNorm1d(16), LINE),
    "transposed image": (nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.BatchNorm2d(16), IMAGE),
    "transposed in groups": (
        nn.ConvTranspose2d(8, 16, 4, 2, 1, groups=2),
        nn.BatchNorm2d(16),
        IMAGE,
    ),
}


def kernels_of_main(module: nn.Module, *args: torch.Tensor) -> list[str]:
    """Return the names of the kernels that a call runs, once per run."""
    tvm_target = pipeline.tvm_target(target())
    with warnings.catch_warnings(), tvm_target, torch.no_grad():
        warnings.simplefilter("ignore")  # deprecations inside torch
        imported = import_program(decompose(torch.export.export(as_module(module), args)))
    main = pipeline.fuse(pipeline.lower(imported.ir_mod, tvm_target), tvm_target)["main"]
    values = (binding.value for block in main.body.blocks for binding in block.bindings)
    calls = (v for v in values if isinstance(v, relax.Call) and v.op.name == "relax.call_tir")
    return [call.args[0].name_hint for call in calls]


@pytest.mark.parametrize("name", LAYERS)
def test_scale_is_in_the_weights(name: str):
    layer, norm, shape = LAYERS[name]
    nn.init.uniform_(norm.weight, -2, 2)
    nn.init.uniform_(norm.bias)
    module, x = trained(nn.Sequential(layer, norm, nn.ReLU())), torch.randn(shape)
    check(module, x)
    kernels = kernels_of_main(module, x)
    assert not any("multiply" in kernel for kernel in kernels), kernels
    # the bias of the layer and the shift are one addition, in the kernel with the activation
    (last,) = (kernel for kernel in kernels if "relu" in kernel)
    assert last.count("add") == 1, kernels
    assert any(part in last for part in ("conv2d", "matmul")), kernels


@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm1d(16)], ids=["plain", "norm"])
def test_lines_stay_images_between_convolutions(norm: nn.Module):
    layers = nn.Conv1d(8, 16, 3), norm, nn.ReLU(), nn.Conv1d(16, 16, 3), nn.Sigmoid()
    module, x = trained(nn.Sequential(*layers)), torch.randn(LINE)
    check(module, x)
    # to channels last and back, and the two convolutions, with nothing in between
    assert len(kernels_of_main(module, x)) == 4


def test_activation_of_a_volume_joins_the_convolution():
    module = nn.Sequential(nn.Conv3d(8, 16, 3), nn.ReLU(), nn.Conv3d(16, 4, 3))
    x = torch.randn(VOLUME[0], 8, 6, 6, 6)
    check(module, x)
    assert any("conv2d" in name and "relu" in name for name in kernels_of_main(module, x))


class Reshaped(nn.Module):
    """A norm over the features of rows, after a reshape that keeps features separate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        transposed = F.relu(self.norm(self.linear(x).transpose(1, 2)))
        return transposed, F.relu(self.norm(self.linear(x).reshape(-1, 16)))


def test_scale_moves_through_transposes_and_reshapes():
    module, x = trained(Reshaped()), torch.randn(3, 5, 8)
    check(module, x)
    assert not any("multiply" in kernel for kernel in kernels_of_main(module, x))


class Shared(nn.Module):
    """One weight, with and without a norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(self.linear(x)), self.linear(y)


def test_weight_also_used_unscaled():
    module, args = trained(Shared()), (torch.randn(4, 8), torch.randn(4, 8))
    check(module, *args)
    kernels = kernels_of_main(module, *args)
    assert len(kernels) == 2
    assert not any("multiply" in kernel for kernel in kernels)


def test_changed_weights_are_rescaled():
    layer, norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
    module, x = trained(nn.Sequential(layer, norm)), torch.randn(4, 8)
    artifact = compiled(module, x)
    for tensor in (layer.weight, layer.bias, norm.weight, norm.running_var):
        assert tensor is not None
        with torch.no_grad():
            tensor.uniform_(0.5, 2)
            assert_close_to_reference(executed(artifact, module, x), module, (x,))


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        return self.norm(y), y


def test_product_read_twice_is_computed_once():
    module, x = trained(ReadTwice()), torch.randn(IMAGE)
    check(module, x)
    assert sum("conv2d" in kernel for kernel in kernels_of_main(module, x)) == 1


def test_computed_weights_and_scales_are_not_packed():
    check(lambda x, w, s: F.conv2d(x, w) * s, torch.randn(IMAGE), *_computed(16, 8, 3, 3))
    check(lambda x, w, s: (x @ w) * s, torch.randn(4, 8), torch.randn(8, 16), torch.randn(1, 16))
    kernels = kernels_of_main(as_module(_gated), torch.randn(4, 8), torch.randn(8, 8))
    assert any("matmul" in kernel and "multiply" in kernel for kernel in kernels), kernels


def _computed(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(shape), torch.randn(1, shape[0], 1, 1)


def _gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w) * torch.arange(8.0)[None]


def test_scales_along_other_axes_stay():
    rows = trained(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)))
    x = torch.randn(4, 16, 8)  # as many rows as columns; the norm is over the rows
    check(rows, x)
    assert any("multiply" in kernel for kernel in kernels_of_main(rows, x))


def test_special_values_are_as_in_eager():
    module = trained(nn.Sequential(nn.Conv1d(8, 16, 3), nn.BatchNorm1d(16), nn.ReLU()))
    x = torch.randn(LINE)
    x[0, 3, 4], x[1, 0, 7], x[1, 2, 15] = float("nan"), float("inf"), float("-inf")
    check(module, x)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)
        self.table = nn.Embedding(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.table(torch.arange(x.shape[1]))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_part_of_a_table_as_long_as_the_input_is_no_bias(scaled: bool):
    module = nn.Sequential(Positions(), Scale() if scaled else nn.Identity()).eval()
    fast: Any = decorate(module, cache=False, compare=False, strict=True)
    with torch.inference_mode():
        for length in (9, 12, 16, 20):
            x = torch.randn(1, length, 8)
            torch.testing.assert_close(fast(x), module(x))
    assert fast.cache_info().builds == 2  # for the first length, and for any


class Scale(nn.Module):
    factors: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", torch.rand(1, 64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factors[:, : x.shape[1]]
