"""The arguments that a program needs to be contiguous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tvmify.artifact.results import Argument
from tvmify.capture import capture
from tvmify.compiler.frontend.sharing import ModuleTensor, sharing
from tvmify.errors import UnsupportedOperator

X, Y = Argument(0), Argument(1)


def needed(function: Callable[..., Any] | nn.Module) -> set[Any]:
    call = (torch.zeros(4, 6), torch.zeros(4, 6)), dict[str, Any]()
    with torch.no_grad():
        program = capture(function, *call).export(*call)
    return set(sharing(program).contiguous)


def of_a_product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = F.linear(x, y)
    return z, z.reshape(-1)


def written_after(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    flat = z.reshape(-1)
    z.add_(1)
    return flat.sum()


def read_after(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    z.reshape(-1).add_(1)
    return z + y


def written_before(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    z.add_(1)
    return z.reshape(-1)


def written_alone(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).reshape(-1).relu_()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        # views of any strides
        (lambda x, y: (x.t(), x[1:, ::2], x.unsqueeze(1).expand(4, 3, 6), y + 1), set()),
        (lambda x, y: (x.view(4, 2, 3), x.reshape(4, 1, 6), *y.chunk(2, 1), x + y), set()),
        (lambda x, y: (z := x + y, z.t(), z.view(-1)), set()),
        (lambda x, y: (x + y).reshape(-1), set()),
        (lambda x, y: x.to(torch.float32) * 2, set()),
        # views or copies
        (lambda x, y: (x.view(-1), y + 1), {X}),
        (lambda x, y: (x.t().reshape(-1), y + 1), {X}),
        (lambda x, y: (z := x + 1, z.reshape(-1), y), {X}),
        (lambda x, y: (z := x + y, z.contiguous()), {X, Y}),
        (lambda x, y: (y.to(memory_format=torch.contiguous_format), x + 1), {Y}),
        (of_a_product, set()),
        # writes
        (written_after, {X}),
        (read_after, {X}),
        (written_before, set()),
        (written_alone, set()),
        (lambda x, y: x.t().add_(1).sum(), set()),
        (lambda x, y: x.reshape(-1).add_(1).sum(), {X}),
        # elements of memory
        (lambda x, y: (x * y).as_strided((3,), (1,)) + 1, {X, Y}),
        (lambda x, y: F.linear(x, y).as_strided((3,), (1,), 2) + 1, set()),
    ],
)
def test_which_arguments_need_to_be_contiguous(function: Callable[..., Any], expected: set[Any]):
    assert needed(function) == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x.as_strided((3,), (1,), 2) + 1,
        lambda x, y: (y[1:].as_strided((3,), (1,), 0), x + 1),
        lambda x, y: x.t().as_strided((3,), (1,), 2).add_(1) + y[0, :3],
    ],
)
def test_offsets_in_memory_that_begins_elsewhere_are_refused(function: Callable[..., Any]):
    with pytest.raises(UnsupportedOperator, match=r"memory of leaf . of the arguments begins"):
        needed(function)


def test_memory_of_weights_counts():
    class Net(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 6))
            self.register_buffer("table", torch.ones(4, 6))

        def forward(self, x: Tensor, y: Tensor) -> Any:
            scaled = self.weight * 2
            first = self.weight.as_strided((3,), (1,)) + 1
            return scaled, scaled.reshape(-1), first, self.table[1:], self.table.view(-1)

    assert needed(Net()) == {ModuleTensor("weight"), ModuleTensor("table")}


@pytest.mark.parametrize("varying", [False, True])
def test_geometry_in_strides(varying: bool):
    def views(x: Tensor) -> tuple[Tensor, ...]:
        halves = x.view(x.shape[0], 2, -1)
        return x.t()[1:], x[1:, ::2], x.diagonal(1), halves, x.unfold(1, 2, 3), x.unbind(1)[3]

    sizes = {"x": {0: torch.export.Dim.DYNAMIC}} if varying else None
    with torch.no_grad():
        module = _Views(views)
        program = torch.export.export(module, (torch.zeros(4, 6),), dynamic_shapes=sizes)
    places = sharing(program).places
    wide = torch.arange(96.0).view(8, 12)
    for x in (wide[:4, :6].contiguous(), wide[::2, 1:7], wide.t()[:4, 2:8], wide[:4, ::2]):
        for place, expected in zip(places, views(x), strict=True):
            assert place is not None and place.geometry is not None
            found = place.geometry.of(x, {"s0": 4})
            assert torch.equal(found, expected) and found.stride() == expected.stride()
            assert found.data_ptr() == expected.data_ptr()


class _Views(nn.Module):
    def __init__(self, views: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.views = views

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.views(x)
