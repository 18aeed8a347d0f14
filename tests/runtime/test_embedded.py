"""The description of an embedded program: written in Python, read in C++."""

from __future__ import annotations

import pytest
import torch

from tvmify.runtime import embedded
from tvmify.signature import SUPPORTED_DTYPES


@pytest.mark.parametrize("dtype", sorted(SUPPORTED_DTYPES, key=str), ids=str)
def test_kinds_are_written_as_native_code_writes_them(dtype: torch.dtype):
    tensors = [torch.empty(shape, dtype=dtype) for shape in ((), (3,), (1, 0, 224))]
    texts = [torch.ops.tvmify.describe(tensor)[0] for tensor in tensors]
    assert embedded.kinds(tensors) == " ".join(texts)


def test_the_fake_kernel_makes_what_the_description_says():
    outputs = [torch.empty(3, 2), torch.empty((), dtype=torch.int64), torch.empty(0, 4)]
    text = embedded.description({"outputs": embedded.kinds(outputs)})
    nothing = torch.empty(0, dtype=torch.uint8, device="meta")
    made = torch.ops.tvmify.execute(nothing, nothing, text, [], [])
    assert embedded.kinds(made) == embedded.kinds(outputs)
    assert {tensor.device.type for tensor in made} == {"meta"}


def test_descriptions_of_nothing_known_are_refused():
    library = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"exported in format , and this version"):
        torch.ops.tvmify.execute(library, library, "strict True", [], [])
