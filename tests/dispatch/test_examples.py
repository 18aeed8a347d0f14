from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch.export import Dim

from tvmify import TensorSpec, WarmUpError
from tvmify.dispatch.examples import example_arguments, sizes_of_classes
from tvmify.dispatch.generality.hints import CLASSES
from tvmify.torch_compat.declared_sizes import DeclaredSize

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "signature",
    [
        [(2, 3)],
        ((2, 3),),
        (2, 3),
        TensorSpec((2, 3)),
        torch.zeros(2, 3),
        [TensorSpec((2, 3))],
        [torch.zeros(2, 3)],
    ],
)
def test_every_form_of_a_warm_up_signature(signature: object) -> None:
    made = example_arguments(signature, torch.float32, CPU)
    assert [TensorSpec.of(arg) for arg in made.args] == [TensorSpec((2, 3))]
    assert (made.kwargs, made.declared, made.dims) == ({}, {}, ())


def test_dims_in_warm_up_signatures() -> None:
    n = Dim("n", max=9)
    signature = [5, (n, 3, Dim.AUTO), {"y": TensorSpec((Dim("n", min=4), Dim.AUTO), torch.int64)}]
    for sizes in None, (6, 7, 8):
        made = example_arguments(signature, torch.float32, CPU, sizes)
        a, b, c = sizes or (2, 2, 2)
        assert made.args[1].shape == (a, 3, b)
        assert TensorSpec.of(made.args[2]["y"]) == TensorSpec((max(a, 4), c), torch.int64)
        assert [(dim.name, dim.least, dim.most) for dim in made.dims] == [
            ("n", 4, 9),
            (None, 2, 2**31 - 1),
            (None, 2, 2**31 - 1),
        ]
        declared = {
            place: [bool(size and size.varies) for size in said]
            for place, said in made.declared.items()
        }
        assert declared == {
            1: [True, False, True],
            2: [True, True],
        }


def test_warm_up_with_keywords_nesting_and_values() -> None:
    signature = {"x": (2,), "rest": [(3,), {"y": (4,)}], "n": 5}
    made = example_arguments(signature, torch.int64, CPU)
    args, kwargs = made.args, made.kwargs
    assert args == ()
    assert kwargs["x"].dtype == torch.int64
    assert kwargs["rest"][0].shape == (3,)
    assert kwargs["rest"][1]["y"].shape == (4,)
    assert kwargs["n"] == 5


def test_warm_up_refuses_invalid_signatures() -> None:
    with pytest.raises(WarmUpError, match="'big'"):
        example_arguments("big", torch.float32, CPU)


@pytest.mark.parametrize(
    ("signature", "size"),
    [((-1, 8), "-1"), ([(4,), (-1, 8)], "-1"), ([TensorSpec((-1, 8))], "-1"), ([("n", 8)], "'n'")],
)
def test_warm_up_names_invalid_sizes(signature: object, size: str) -> None:
    with pytest.raises(WarmUpError, match=f"{size} is not a size"):
        example_arguments(signature, torch.float32, CPU)


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
