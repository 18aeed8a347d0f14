from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tvmify.compiler.frontend.refusals import refuse_errors, refuse_quantization
from tvmify.errors import UnsupportedOperator

X = torch.tensor([1.0, -2.0, 3.0])


def exported(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.export.ExportedProgram:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    return torch.export.export(Module(), (X,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(min=1e39),
        lambda x: F.leaky_relu(x, 1e39),
        lambda x: F.softplus(x, threshold=1e39),
        lambda x: torch.addcmul(x, x, x, value=-1e39),
        lambda x: torch.add(x, x, alpha=1e39),
        lambda x: torch.full_like(x, 1e39),
        lambda x: x.clone().fill_(1e39),
        lambda x: x.half().masked_fill(x > 0, -1e9),
        lambda x: x.bfloat16().clamp(max=3.4e38),
        lambda x: x.to(torch.uint8).clamp(min=-256),
        lambda x: x.int().masked_fill(x > 0, 2**31),
        lambda x: torch.full_like(x, 300, dtype=torch.int8),
    ],
)
def test_numbers_that_eager_cannot_convert_are_refused(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(RuntimeError, match="without overflow"):
        function(X)
    with pytest.raises(UnsupportedOperator, match="does not fit in torch"):
        refuse_errors(exported(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1e39,
        lambda x: x * 1e39,
        lambda x: x / 1e39,
        lambda x: 1e39 - x,
        lambda x: x.clamp(min=float("-inf")),
        lambda x: x.double().clamp(max=1e39),
        lambda x: x.masked_fill(x > 0, float("inf")),
        lambda x: x.to(torch.uint8) * 1000003,
        lambda x: x.to(torch.uint8).clamp(min=-1),
    ],
)
def test_numbers_that_eager_converts_are_not_refused(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    function(X)
    refuse_errors(exported(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.half() @ torch.ones(3, 3),
        lambda x: F.linear(x.double(), torch.ones(2, 3)),
        lambda x: F.conv1d(x.view(1, 3, 1), torch.ones(1, 3, 1).double()),
        lambda x: torch.addmm(x, torch.ones(3, 3).double(), torch.ones(3, 3).double()),
    ],
)
def test_products_of_different_types_are_refused(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(RuntimeError):
        function(X)
    with pytest.raises(UnsupportedOperator, match=r"torch\.float32"):
        refuse_errors(exported(function))


def test_products_of_one_type_are_not_refused() -> None:
    refuse_errors(exported(lambda x: F.linear(x.double(), torch.ones(2, 3).double()) + x[0]))


def test_operators_that_quantize_are_refused() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()

    with pytest.raises(UnsupportedOperator, match="quantize_per_tensor"):
        refuse_quantization(exported(function))
