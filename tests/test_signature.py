from __future__ import annotations

import pytest
import torch
from torch.export import Dim

from tvmify import TensorSpec, UnsupportedInput, WarmUpError
from tvmify.signature import Signature, example_arguments

CPU = torch.device("cpu")


def test_spec_describes_and_makes_a_tensor() -> None:
    spec = TensorSpec.of(torch.ones(2, 3, dtype=torch.int32))
    assert spec == TensorSpec((2, 3), torch.int32)
    assert str(spec) == "int32[2, 3] cpu"
    assert TensorSpec.of(spec.example()) == spec


def test_signature_names_structure_leaves_and_values() -> None:
    x = torch.ones(2, 3)
    signature = Signature.of((x, {"scale": 2}), {"mask": None})
    assert signature.leaves == (TensorSpec((2, 3)), "int 2", "NoneType None")
    assert signature != Signature.of((x, {"scale": 3}), {"mask": None})
    assert signature != Signature.of((x, {"shift": 2}), {"mask": None})
    other = Signature.of((x, {"scale": 2.0}), {"mask": None})
    assert signature.key_text("cpu") != other.key_text("cpu")
    assert signature == Signature.of((torch.zeros(2, 3), {"scale": 2}), {"mask": None})


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.ones(2, dtype=torch.complex64), "complex64"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "negation"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quantised"),
        (torch.empty(2, dtype=torch.float8_e4m3fn), "float8"),
        (torch.empty(1, dtype=torch.int8).expand(2**31), "2147483648 elements"),
    ],
)
def test_tensors_that_native_code_would_misread_are_refused(
    tensor: torch.Tensor, word: str
) -> None:
    with pytest.raises(UnsupportedInput, match=word):
        Signature.of((tensor,), {})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_called_so() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(UnsupportedInput, match="is a nested tensor"):
        Signature.of((nested,), {})


def test_refusal_names_the_argument() -> None:
    with pytest.raises(UnsupportedInput, match=r"argument \['mask'\] is a builtins.object"):
        Signature.of((), {"mask": object()})


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


def test_sizes_of_a_warm_up_signature_that_vary() -> None:
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


def test_warm_up_refuses_what_is_no_signature() -> None:
    with pytest.raises(WarmUpError, match="'big'"):
        example_arguments("big", torch.float32, CPU)
