"""Example sizes for each class of sizes."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from tvmify.dispatch.class_sizes import sizes_of_classes
from tvmify.dispatch.hints import CLASSES
from tvmify.torch_compat.declared_sizes import DeclaredSize


def dim(least: int = 2, most: int = 2**31 - 1) -> DeclaredSize:
    return DeclaredSize(True, None, least, most)


def number_of_class(sizes: tuple[int, ...]) -> int:
    return next(i for i, (most, _) in enumerate(CLASSES) if prod(sizes) <= most)


@pytest.mark.parametrize(
    ("dims", "classes"),
    [
        ([dim()], [0, 1, 2]),
        ([dim(), dim()], [0, 1, 2]),
        ([dim(most=64), dim(most=512)], [0, 1, 2]),
        ([dim(most=12)], [0]),
        ([dim(65, 65)], [1]),
        ([dim(20, 70)], [0, 1]),
        ([dim(most=3), dim(100, 100)], [1, 2]),
        ([dim(100), dim(100)], [2]),
        ([dim(2, 5), dim(2, 5), dim(2, 5)], [0, 1]),
        ([dim(3, 3), dim()], [0, 1, 2]),
        ([dim(9), dim(9)], [1, 2]),
    ],
)
def test_each_class_within_the_limits_has_sizes(dims: Any, classes: list[int]) -> None:
    found = sizes_of_classes(dims)
    assert [*map(number_of_class, found)] == classes
    for sizes in found:
        assert all(d.least <= s <= d.most for s, d in zip(sizes, dims, strict=True))
