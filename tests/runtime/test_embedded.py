"""The operators of embedded programs, and their description: written in Python, read in C++."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tvmify import TvmifyWarning
from tvmify.runtime import embedded
from tvmify.signature import SUPPORTED_DTYPES

X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture(scope="module")
def linear() -> tuple[tuple[Any, ...], nn.Linear]:
    """The arguments of the operator for a linear layer, and the layer."""
    layer = nn.Linear(8, 16).eval()
    program = tvmify.export(tvmify.tvmify(layer, cache=False), signature=[(4, 8)])
    (call,) = program.graph.find_nodes(op="call_function", target=torch.ops.tvmify.execute.default)
    library, original = (program.constants[f"tvmify_{name}"] for name in ("library", "original"))
    weights = [layer.weight.detach(), layer.bias.detach()]
    return (library, original, call.args[2], weights, [X]), layer


@pytest.mark.parametrize("dtype", sorted(SUPPORTED_DTYPES, key=str), ids=str)
def test_kinds_are_written_as_native_code_writes_them(dtype: torch.dtype):
    tensors = [torch.empty(shape, dtype=dtype) for shape in ((), (3,), (1, 0, 224))]
    texts = [torch.ops.tvmify.describe(tensor)[0] for tensor in tensors]
    assert embedded.kinds(tensors) == " ".join(texts)


def test_fake_kernel_matches_the_description():
    outputs = [torch.empty(3, 2), torch.empty((), dtype=torch.int64), torch.empty(0, 4)]
    text = embedded.description({"outputs": embedded.kinds(outputs)})
    nothing = torch.empty(0, dtype=torch.uint8, device="meta")
    made = torch.ops.tvmify.execute(nothing, nothing, text, [], [])
    assert embedded.kinds(made) == embedded.kinds(outputs)
    assert {tensor.device.type for tensor in made} == {"meta"}


def test_unknown_descriptions_are_refused():
    library = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"exported in format , and this version"):
        torch.ops.tvmify.execute(library, library, "strict True", [], [])


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # by a check in PyTorch 2.15
def test_the_operators_obey_the_rules(linear: tuple[tuple[Any, ...], nn.Linear]):
    operands, _ = linear
    _, original, description, weights, inputs = operands
    torch.library.opcheck(torch.ops.tvmify.execute.default, operands)
    differentiable = [weight.detach().requires_grad_() for weight in weights]
    operands = (*operands[:3], differentiable, inputs)
    torch.library.opcheck(torch.ops.tvmify.execute.default, operands)
    given = (original, description, weights, inputs, [torch.randn(4, 16)], [True, False, True])
    torch.library.opcheck(torch.ops.tvmify.execute_backward.default, given)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("tvmify 1", "format 9"),
        ("code 1", "format 9"),
        ("runtime apache-tvm==", "was built for 9"),
    ],
)
def test_another_version_runs_the_original(
    linear: tuple[tuple[Any, ...], nn.Linear], line: str, reason: str
):
    (library, original, description, *rest), layer = linear
    assert f"\n{line}" in f"\n{description}"
    name = line.partition(" ")[0]
    lines = [
        f"{name} 9" if text.startswith(f"{name} ") else text for text in description.splitlines()
    ]
    with pytest.warns(TvmifyWarning, match=reason):
        (result,) = torch.ops.tvmify.execute(library, original, "\n".join(lines), *rest)
    assert torch.equal(result, layer(X))


def test_weights_of_other_shapes_are_not_read(linear: tuple[tuple[Any, ...], nn.Linear]):
    operands, _ = linear
    short = [torch.randn(2, 8), torch.randn(2)]
    with (
        pytest.warns(TvmifyWarning, match="a weight has another dtype or shape"),
        pytest.raises(RuntimeError, match="shape"),
    ):
        torch.ops.tvmify.execute(*operands[:3], short, [X])


def test_a_library_is_plain_bytes(linear: tuple[tuple[Any, ...], nn.Linear]):
    operands, _ = linear
    for library in (operands[0].float(), operands[0][:1].expand(1 << 40)):
        with pytest.raises(TypeError, match="uint8"):
            torch.ops.tvmify.execute(library, *operands[1:])
