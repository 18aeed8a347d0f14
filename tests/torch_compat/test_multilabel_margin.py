"""The loss of ``nn.MultiLabelMarginLoss``, whose labels end at the first -1 of a row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn import _reduction

from tests.compiler.programs import check
from tvmify.torch_compat.multilabel_margin import multilabel_margin_loss

LABELS = torch.tensor([[0, 2, -1, 1], [3, 0, 0, 2], [-1, 1, 2, 3]])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_loss_and_gradient_are_those_of_eager(reduction: str) -> None:
    enum = _reduction.get_enum(reduction)
    x = torch.randn(3, 4)
    for scores, labels in ((x, LABELS), (x[0], LABELS[0]), (x[0, 0], LABELS[2, 1] - 1)):
        mine, eager = (scores.clone().requires_grad_() for _ in range(2))
        loss = multilabel_margin_loss(mine, labels, enum)
        want = F.multilabel_margin_loss(eager, labels, reduction=reduction)
        torch.testing.assert_close(loss, want)
        loss.sum().backward()
        want.sum().backward()
        torch.testing.assert_close(mine.grad, eager.grad)


def test_the_compiled_loss_counts_no_places_after_the_last_label() -> None:
    check(lambda x: F.multilabel_margin_loss(x, LABELS, reduction="none"), torch.randn(3, 4))


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_training_counts_no_places_after_the_last_label(reduction: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return F.multilabel_margin_loss(x.tanh(), LABELS, reduction=reduction)

    x = torch.randn(3, 4, requires_grad=True)
    got, want = torch.compile(program, backend="tvmify")(x), program(x)
    torch.testing.assert_close(got, want)
    (gradient,) = torch.autograd.grad(got.sum(), x)
    torch.testing.assert_close(gradient, *torch.autograd.grad(want.sum(), x))


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_the_old_names_of_reductions_work() -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        return F.multilabel_margin_loss(x, LABELS, size_average=False)

    torch.testing.assert_close(torch.compile(program, backend="tvmify")(x), program(x))
