"""Sizes that vary, declared by a ``Dim`` in warmup."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.dispatch.generality.nets import Linear, Pair, check, compiled, drawn
from tvmify import TensorSpec, TvmifyWarning, WarmUpError


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, ids: torch.Tensor, scale: float) -> torch.Tensor:
        return self.table(ids).mean(1) * scale


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_all_classes_of_sizes_are_made_ahead(dynamic: bool | None) -> None:
    module = Linear()
    fast = compiled(module, dynamic)
    info = fast.warmup([(Dim("rows", max=100), 8)])
    assert info.builds == 2  # up to 64 and up to 256
    for rows in (2, 17, 64, 65, 100):
        check(fast, module, drawn(rows, 8))
    assert fast.warmup([(Dim("rows", max=100), 8)]).builds == 2
    check(fast, module, drawn(101, 8))
    assert fast.cache_info().builds == 3


def test_warmup_generalizes_earlier_shapes() -> None:
    module = Linear()
    fast = compiled(module)
    for rows in (2, 3):
        check(fast, module, drawn(rows, 8))
    fast.warmup([(Dim.AUTO(max=16), 8)])
    builds = fast.cache_info().builds
    for rows in (2, 3, 4, 5):
        check(fast, module, drawn(rows, 8))
    assert fast.cache_info().builds == builds


def test_dims_may_stand_for_any_size_of_any_argument() -> None:
    torch.manual_seed(0)
    rows, length = Dim("rows", max=4), Dim("length", max=4)
    module = Embedded().eval()
    fast = compiled(module)
    ids = TensorSpec((rows, length), torch.int64)
    assert fast.warmup({"ids": ids, "scale": 0.5}).builds == 1
    with torch.no_grad():
        for shape in ((2, 3), (4, 4), (3, 2)):
            ids = torch.zeros(shape, dtype=torch.int64)
            torch.testing.assert_close(fast(ids=ids, scale=0.5), module(ids, 0.5))
    assert fast.cache_info().builds == 1

    pair = compiled(Pair())
    assert pair.warmup([(rows, 8), (rows,)]).builds == 1
    pair(drawn(4, 8), drawn(4))
    assert pair.cache_info().builds == 1
    pair(drawn(4, 8), drawn(3))  # these are not equal
    assert pair.cache_info().builds == 2


def test_ungeneralizable_dim_warns_and_builds_one_size() -> None:
    fast = compiled(nn.Upsample(scale_factor=1.3, mode="bicubic"))
    with pytest.warns(TvmifyWarning, match="no program for all sizes of"):
        info = fast.warmup([(1, 3, Dim("height"), 8)])
    assert info.builds == 1


@pytest.mark.parametrize("size", [Dim.STATIC, Dim("n", max=1)])
def test_invariable_dim_is_refused(size: Any) -> None:
    with pytest.raises(WarmUpError, match="is static"):
        compiled(Linear()).warmup([(size, 8)])
