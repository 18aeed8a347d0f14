"""Einsums, which become one product without a copy if possible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compiler.programs import check
from tests.tolerances import assert_close_to_reference
from tvmify.compiler.frontend.einsum import einsum

SIZES = dict(zip("bhlsdkij", (2, 3, 4, 5, 6, 7, 3, 4), strict=True))


def operands(equation: str, lead: tuple[int, ...] = (2, 3)) -> list[Tensor]:
    inputs = equation.replace(" ", "").partition("->")[0].split(",")
    return [
        torch.randn(*(lead if "..." in x else ()), *(SIZES[i] for i in x.replace("...", "")))
        for x in inputs
    ]


PRODUCTS = (
    "blhd,bshd->bhls",
    "bhls,bshd->blhd",
    "bhid, bhjd -> bhij",
    "bsd,dhk->bshk",
    "bshk,hkd->bsd",
    "bld,kd->blk",
    "dk,bsd->bks",
    "ij,jk->ik",
    "ij,jk->ki",
    "i,j->ij",
    "i,i->",
    "bi,bi->b",
    "bij,bij->bij",
    "ij,ij->",
    "ij,j->i",
    "bhd,bhd->bh",
    "...id,...jd->...ij",
    "...d,dk->...k",
    "...i,i->...",
    "i,...i->...",
    "bld,...hd->...blh",
)
OTHERS = ("ii,ij->ij", "ij,jk", "ij,k->i", "ij->j", "ii->", "ij,jk,kl->il")


class Products(TorchDispatchMode):
    """Counts matrix products and element-wise products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mul", "mm", "mv", "bmm", "dot")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("equation", PRODUCTS)
def test_one_product(equation: str):
    args = operands(equation)
    with Products() as products:
        result = einsum(equation, args)
    assert products.count == 1
    assert_close_to_reference(result, Einsum(equation), tuple(args))


@pytest.mark.parametrize("equation", OTHERS)
def test_others(equation: str):
    check(Einsum(equation), *operands(equation))


def test_axes_of_one_element_are_repeated():
    check(Einsum("ij,jk->ik"), torch.randn(3, 1), torch.randn(4, 5))


def test_ranks_of_an_ellipsis():
    check(Einsum("...i,...ij->...j"), torch.randn(2, 3, 4), torch.randn(3, 4, 5))
    check(Einsum("...i,...i->..."), torch.randn(4), torch.randn(2, 3, 4))


class Einsum(nn.Module):
    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, *args: Tensor) -> Tensor:
        return torch.einsum(self.equation, *args)


class Projection(nn.Module):
    """A product that also splits heads, as in models ported from TensorFlow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 4, 8))
        self.back = nn.Parameter(torch.randn(4, 8, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(
            "bshk,hkd->bsd", torch.einsum("bsd,dhk->bshk", x, self.weight), self.back
        )


def test_weights_are_packed_once():
    artifact = check(Projection().eval(), torch.randn(2, 5, 32))
    rules = {name: rule for name, rule in artifact.report["kernels"].items() if "pack" not in name}
    assert set(rules.values()) == {"matmul"}
