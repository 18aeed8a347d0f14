"""The memory layouts of recorded tensors."""

from __future__ import annotations

import pytest
import torch

from tvmify.torch_compat.layouts import inverse, memory_order

X = torch.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (X, None),
        (X[:, ::2], None),
        (X.transpose(0, 1)[:, :1], None),
        (X[:, :, :1].expand(2, 3, 4), None),
        (X.transpose(0, 1), [1, 0, 2]),
        (X.permute(2, 0, 1), [1, 2, 0]),
        (X.permute(2, 0, 1)[:, ::2], [1, 2, 0]),
        (X.new_empty(1, 3, 2, 2).to(memory_format=torch.channels_last), [0, 2, 3, 1]),
    ],
    ids=["plain", "part", "one", "expanded", "transposed", "permuted", "its part", "channels last"],
)
def test_order_in_memory(tensor: torch.Tensor, order: list[int] | None) -> None:
    assert memory_order(tensor) == order


def test_undone_permutation() -> None:
    order = [2, 0, 1]
    assert X.permute(order).permute(inverse(order)).stride() == X.stride()
