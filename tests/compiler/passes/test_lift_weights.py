"""Computations on weights alone move out of ``main``, but results stay there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.programs import check


class Positions(nn.Module):
    """Its results do not depend on its argument, if it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor | None = None) -> Tensor:
        return self.table[1:].softmax(-1) * 2


@pytest.mark.parametrize("arguments", [(), (torch.ones(3),)], ids=["none", "unread"])
def test_results_of_weights_alone(arguments: tuple[Tensor, ...]) -> None:
    torch.manual_seed(0)
    check(Positions(), *arguments)
