"""Covariances in recorded code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim, export

from tests.compiler.programs import Program
from tests.tolerances import assert_close_to_reference
from tvmify.torch_compat.covariance import Covariances

CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "of columns": lambda x: torch.cov(x.T),
    "method": lambda x: x.cov(correction=0),
    "operator": lambda x: torch.ops.aten.cov(x, correction=2),
    "of a vector": lambda x: torch.cov(x[:, 0]),
    "of integers": lambda x: (x * 10).long().T.cov(),
    "correlation": lambda x: torch.corrcoef(x.T),
    "correlation of rows": lambda x: x.corrcoef(),
    "correlation of a vector": lambda x: x[0].corrcoef(),
}


@pytest.mark.parametrize("name", CASES)
def test_covariances_of_any_size_are_recorded(name: str) -> None:
    torch.manual_seed(0)
    module, sizes = Program(CASES[name]), ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    with Covariances():
        program = export(module, (torch.randn(7, 4),), dynamic_shapes=(sizes,))
    for shape in ((7, 4), (5, 6)):
        x = torch.randn(shape)
        assert_close_to_reference(program.module()(x), module, (x,))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_other_covariances_are_left_to_torch() -> None:
    x = torch.randn(3, 4)
    for options in ({"aweights": x[0].abs()}, {"correction": 4}, {"fweights": torch.arange(4)}):
        with Covariances():
            assert torch.equal(torch.cov(x, **options), torch.Tensor.cov(x, **options))
        with Covariances(), pytest.raises(RuntimeError, match="two or fewer dimensions"):
            torch.cov(x[None, None], **options)
