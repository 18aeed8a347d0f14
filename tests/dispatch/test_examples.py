from __future__ import annotations

import pytest
import torch
from torch.export import Dim

from tvmify import TensorSpec, WarmUpError
from tvmify.dispatch.examples import example_arguments

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
