"""Weights of three axes and more: a matrix for each expert, head or group, packed once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.programs import as_module, check, compiled, executed, scheduled, with_specials
from tests.tolerances import assert_close_to_reference
from tvmify.artifact import Artifact

Operation = Callable[[Tensor, Tensor], Tensor]


class Weighted(nn.Module):
    def __init__(self, *shape: int, operation: Operation = torch.matmul) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape) / shape[-2] ** 0.5)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x, self.weight)


def _is_packed(artifact: Artifact, elements: int) -> bool:
    """Whether there is one weight, packed, of at least `elements` elements."""
    (name,) = artifact.packed
    kind, shape = name.split(": ")[:2]
    extents = shape[shape.index("[") + 1 : shape.index("]")].split(",")
    each = 2 if shape.startswith("int32") else 1  # two of bfloat16 may be one word
    return kind == "packed" and each * torch.Size(map(int, extents)).numel() >= elements


def _called(artifact: Artifact) -> list[str]:
    return [rule for name, rule in artifact.report["kernels"].items() if "pack" not in name]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((8, 16, 64), (8, 64, 70)),
        ((4, 1, 64), (4, 64, 200)),
        ((5, 32), (3, 32, 40)),
        ((2, 5, 32), (1, 32, 40)),
        ((2, 1, 5, 32), (3, 32, 40)),
        ((2, 3, 5, 32), (3, 32, 40)),
        ((2, 3, 1, 32), (3, 32, 40)),
        ((3, 2, 5, 32), (3, 1, 32, 17)),
        ((3, 2, 5, 32), (1, 2, 32, 17)),
        ((1, 2, 5, 32), (4, 1, 32, 17)),
        ((2, 3, 1, 9, 32), (3, 4, 32, 17)),
        ((4, 1, 1, 7), (1, 3, 7, 9)),
        ((4, 45, 2050), (4, 2050, 33)),
        ((2, 300, 64), (2, 64, 300)),
    ],
)
def test_products(left: tuple[int, ...], right: tuple[int, ...]):
    artifact = check(Weighted(*right), torch.randn(*left))
    assert _is_packed(artifact, torch.Size(right).numel())
    assert _called(artifact) == ["matmul"]


@pytest.mark.parametrize(
    ("operation", "left", "right"),
    [
        (torch.bmm, (8, 6, 32), (8, 32, 40)),
        (lambda x, w: torch.bmm(x, w.mT), (8, 6, 32), (8, 40, 32)),
        (lambda x, w: x @ w.permute(1, 2, 0), (8, 6, 32), (40, 8, 32)),
        (lambda x, w: x @ w.view(8, 32, 40), (8, 6, 32), (256, 40)),
        (lambda x, w: torch.einsum("bsi,bio->bso", x, w), (2, 6, 32), (2, 32, 40)),
        (lambda x, w: torch.baddbmm(x, x, w, beta=0.5, alpha=2), (4, 6, 32), (4, 32, 32)),
        (lambda x, w: torch.relu(x @ w) + 1, (8, 6, 32), (8, 32, 40)),
        (lambda x, w: torch.relu(x @ w) + x, (2, 8, 6, 32), (8, 32, 32)),
    ],
)
def test_spellings(operation: Operation, left: tuple[int, ...], right: tuple[int, ...]):
    artifact = check(Weighted(*right, operation=operation), torch.randn(*left))
    assert _is_packed(artifact, torch.Size(right).numel())
    assert _called(artifact) == ["matmul"]


@pytest.mark.parametrize(
    ("operation", "right"),
    [
        (lambda x, w: torch.einsum("bsd,dhe->bhse", x, w), (32, 4, 8)),
        (lambda x, w: torch.einsum("bsd,hde->bhse", x, w), (4, 32, 8)),
        (lambda x, w: x.unsqueeze(1) @ w, (4, 32, 8)),
        (lambda x, w: torch.einsum("bshd,hde->bshe", x.view(2, 9, 4, 8), w), (4, 8, 16)),
    ],
)
def test_heads(operation: Operation, right: tuple[int, ...]):
    artifact = check(Weighted(*right, operation=operation), torch.randn(2, 9, 32))
    assert _is_packed(artifact, torch.Size(right).numel())


def test_experts():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, 32, 2 * 48) / 32**0.5)
            self.up_bias = nn.Parameter(torch.randn(4, 1, 2 * 48))
            self.down = nn.Parameter(torch.randn(4, 48, 32) / 48**0.5)
            self.router = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            share = self.router(x).softmax(-1)
            gate, up = (x @ self.up + self.up_bias).chunk(2, dim=-1)
            made = (gate * gate.sigmoid() * up) @ self.down
            return (made * share.t().unsqueeze(-1)).sum(0)

    artifact = check(Experts().eval(), torch.randn(7, 32))
    assert sum("[4," in name and name.startswith("packed") for name in artifact.packed) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types(dtype: torch.dtype):
    artifact = check(Weighted(3, 32, 40).to(dtype), torch.randn(2, 3, 5, 32).to(dtype))
    assert _is_packed(artifact, 3 * 32 * 40)


def test_nan_and_infinities_stay_in_their_rows():
    module, x = Weighted(3, 9, 20), with_specials(2, 3, 5, 9)
    with torch.no_grad():
        module.weight[1, 2, 3] = torch.inf
        module.weight[2, 0, 0] = torch.nan
    check(module, x)


def test_a_scale_of_the_columns_is_in_the_weights():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 16, 24))
            self.scale = nn.Parameter(torch.rand(24))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight * self.scale

    artifact = check(Scaled(), torch.randn(3, 5, 16))
    assert len(artifact.packed) == 1
    assert _called(artifact) == ["matmul"]


def test_shapes_of_input_share_a_copy():
    module = Weighted(4, 32, 48)
    names = {compiled(module, torch.randn(n, 4, 8, 32)).packed for n in (1, 2)}
    assert len(names) == 1


def test_main_function_does_not_pack():
    ir_mod, _ = scheduled(Weighted(8, 64, 96), torch.randn(8, 16, 64))
    assert "pack_matmul" in ir_mod["pack"].script()
    assert "pack" not in ir_mod["main"].script().split(":", 1)[1].replace("packed", "")


def test_activations_are_not_packed():
    """A product of two activations, and weights that depend on an input."""
    module = Weighted(3, 32, 40, operation=lambda x, w: x @ (w * x.mean()))
    artifact = compiled(module, torch.randn(3, 5, 32))
    assert artifact.packed[0].startswith("weight: ")
    with torch.no_grad():
        x = torch.randn(3, 5, 32)
        assert_close_to_reference(executed(artifact, module, x), as_module(module), (x,))


@pytest.mark.parametrize(
    ("left", "right"),
    [((4, 3, 7, 16), (3, 16, 20)), ((2, 3, 1, 16), (3, 16, 20)), ((3, 4, 9, 16), (3, 1, 16, 33))],
)
def test_activations_shared_by_many_rows(left: tuple[int, ...], right: tuple[int, ...]):
    artifact = check(torch.matmul, torch.randn(*left), torch.randn(*right))
    assert _called(artifact) == ["matmul"]
