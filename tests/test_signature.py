from __future__ import annotations

from collections import UserDict

import pytest
import torch

from tvmify import TensorSpec, UnsupportedInput
from tvmify.signature import Signature, check_weight, unreadable_kind


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
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quantized"),
        (torch.empty(2, dtype=torch.float8_e4m3fn), "float8"),
        (torch.empty(1, dtype=torch.int8).expand(2**31), "2147483648 elements"),
    ],
)
def test_unreadable_tensors_are_refused(tensor: torch.Tensor, word: str) -> None:
    with pytest.raises(UnsupportedInput, match=word):
        Signature.of((tensor,), {})


def test_only_weights_must_be_conjugated_already() -> None:
    z = torch.ones(2, dtype=torch.complex64).conj()
    assert Signature.of((z,), {}) == Signature.of((z.resolve_conj(),), {})
    for weight in (z, z.imag):
        with pytest.raises(UnsupportedInput, match="pending negation or conjugation"):
            check_weight("weight 'z'", weight)
        assert unreadable_kind(weight)
    check_weight("weight 'z'", z.resolve_conj())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_called_so() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(UnsupportedInput, match="is a nested tensor"):
        Signature.of((nested,), {})


def test_refusal_names_the_argument() -> None:
    with pytest.raises(UnsupportedInput, match=r"argument \['mask'\] is a builtins.object"):
        Signature.of((), {"mask": object()})


def test_complex_number_is_refused_with_advice() -> None:
    with pytest.raises(UnsupportedInput, match=r"is a builtins.complex. Pass torch.tensor\(z\)"):
        Signature.of((1j,), {})


def test_batch_encoding_is_refused_with_advice() -> None:
    with pytest.raises(UnsupportedInput, match=r"is a collections.UserDict. Pass its items as key"):
        Signature.of((UserDict(ids=torch.zeros(3)),), {})
