"""Dtypes, kinds of tensors and grad modes through the decorator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tests.tolerances import assert_close_to_reference
from tvmify import TvmifyWarning
from tvmify import tvmify as decorate

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


class Arithmetic(nn.Module):
    """Arithmetic for every dtype; results have eager's values and dtypes."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x + y,
            x * 2 + 1,
            x / (y.abs() + 1),
            x > y,
            torch.where(x > y, x, y),
            x.sum(0),
            x.amax(1),
            x.float().mean(),
            x.to(torch.int32),
            torch.cat([x, y]).reshape(-1, 2).t(),
            x[:, 1:].cumsum(1),
            x @ y.t(),
        )


class Booleans(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x & y, x | ~y, x ^ y, x.sum(1), x.any(0), x.all(1), x + y, x * 3, x.to(torch.uint8)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.batch_norm(self.convolution(x))).mean((2, 3))
        return torch.softmax(self.norm(self.linear(x)), -1)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_numbers(dtype: torch.dtype, inference: None) -> None:
    net = Arithmetic().eval()
    fast = decorate(net, strict=True)
    x, y = (torch.randint(0, 7, (4, 6)).to(dtype) for _ in range(2))
    assert_close_to_reference(fast(x, y), net, (x, y))


def test_booleans(inference: None) -> None:
    net = Booleans().eval()
    x, y = torch.rand(4, 6) > 0.5, torch.rand(4, 6) > 0.5
    for ours, eager in zip(decorate(net, strict=True)(x, y), net(x, y), strict=True):
        assert ours.dtype == eager.dtype
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layers(dtype: torch.dtype, inference: None) -> None:
    net = Layers().eval().to(dtype)
    x = torch.randn(2, 3, 6, 6).to(dtype)
    assert_close_to_reference(decorate(net, strict=True)(x), net, (x,))


class Subclass(torch.Tensor):
    pass


X = torch.linspace(-1, 1, 12).reshape(3, 4)
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: X.relu().to_sparse(),
    "sparse rows": lambda: X.relu().to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([X, X[:2]]),
    "jagged": lambda: torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged),
    "subclass": lambda: X.as_subclass(Subclass),
    "float8": lambda: X.to(torch.float8_e4m3fn),
    "uint16": lambda: torch.ones(3, dtype=torch.uint16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_tensors_are_left_to_pytorch_with_a_reason(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        tensor = KINDS[kind]()
    fast: Any = decorate(lambda x: x.clone())
    with torch.no_grad(), pytest.warns(TvmifyWarning, match="runs in eager PyTorch"):
        result = fast(tensor)
    assert (type(result), result.dtype, result.layout) == (
        type(tensor),
        tensor.dtype,
        tensor.layout,
    )
    with pytest.raises(tvmify.UnsupportedInput), torch.no_grad():
        decorate(lambda x: x.clone(), strict=True)(tensor)


# -------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("made_in", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_run_compiled(mode: Any, made_in: Any) -> None:
    net = nn.Linear(4, 4).eval()
    fast: Any = decorate(net, strict=True)
    with made_in():
        x = X.clone()
    with mode():
        result = fast(x)
        again = fast(result)  # an inference tensor in inference mode
        torch.testing.assert_close(again, net(net(x)))
        assert result.is_inference() == net(x).is_inference()
        assert not result.requires_grad
    assert fast.cache_info().builds == 1


def test_training_is_eager_and_said_once_for_a_module() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    fast: Any = decorate(net)
    with pytest.warns(TvmifyWarning, match="training mode") as warned:
        for rows in (1, 2, 3):
            fast(X[:rows]).sum().backward()
    assert len(warned) == 1
    assert net[0].weight.grad is not None
