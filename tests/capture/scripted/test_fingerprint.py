"""Equal programs have equal fingerprints, in any process; different programs never do."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture import nets
from tests.processes import run_python
from tvmify.capture import capture
from tvmify.capture.scripted.fingerprint import tensor_digest

X = torch.rand(3, 4)


class Minus(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.scale = 1.0
        self.sizes = [1, 2]
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y) * self.scale + self.sizes[0] / self.sizes[1]


class MinusTurned(Minus):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (y - x) * self.scale + self.sizes[0] / self.sizes[1]


class Plus(Minus):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y) * self.scale + self.sizes[0] / self.sizes[1]


class Literal(Minus):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y) * torch.tensor([1.0, 2.0, 3.0, 4.0])


class OtherLiteral(Minus):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y) * torch.tensor([1.0, 2.0, 3.0, 5.0])


class Default(Minus):
    def forward(self, x: Tensor, y: Tensor, z: float = 1.0) -> Tensor:
        return (x - y) * z


class OtherDefault(Minus):
    def forward(self, x: Tensor, y: Tensor, z: float = 1.5) -> Tensor:
        return (x - y) * z


class InBranch(Minus):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[0] > 3:
            return x - y
        return x + y


class InOtherBranch(Minus):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[0] > 3:
            return x + y
        return x - y


class Named(Minus):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"a": x - y}


class NamedOtherwise(Minus):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"b": x - y}


class Masked(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.mask = torch.zeros(4)
        self.value = value

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.masked_fill(self.mask == self.value, 1.0) + y


class MaskedOtherwise(Masked):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.masked_fill(self.mask != self.value, 1.0) + y


class FirstOfPair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> nets.Pair:
        return nets.Pair(x, y)


class OtherOfPair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> nets.Pair:
        return nets.Pair(y, x)


DIFFERENT = [
    Minus(),
    MinusTurned(),
    Plus(),
    Minus(scale=2.0),
    Minus(scale=-1.0),
    Minus(scale=1),
    Minus(sizes=[1, 3]),
    Minus(sizes=[2, 1]),
    Literal(),
    OtherLiteral(),
    Default(),
    OtherDefault(),
    InBranch(),
    InOtherBranch(),
    Named(),
    NamedOtherwise(),
    Masked(0),
    Masked(1),
    MaskedOtherwise(0),
    FirstOfPair(),
    OtherOfPair(),
    nn.Bilinear(4, 4, 2),
    nn.Bilinear(4, 4, 2, bias=False),
]


@pytest.mark.parametrize("method", ["torchscript", "export"])
def test_different_programs_have_different_fingerprints(method: str) -> None:
    fingerprints = []
    for module in DIFFERENT:
        module = module if method == "torchscript" else nets.Starred(module)
        program = capture(module.eval(), (X, X), {})
        assert program.method == method, program.reason
        fingerprints.append(program.fingerprint)
    for (i, a), (j, b) in itertools.combinations(enumerate(fingerprints), 2):
        assert a != b, f"{DIFFERENT[i]} and {DIFFERENT[j]}"


def test_tensor_constants_count_by_value() -> None:
    def traced(table: Tensor) -> str:
        return capture(torch.jit.trace(lambda x: x * table, X), (X,), {}).fingerprint

    assert traced(torch.zeros(4)) == traced(torch.zeros(4))
    different = {traced(t) for t in (torch.zeros(4), torch.ones(4), torch.zeros(3, 1))}
    assert len(different) == 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, 4),
        torch.rand(3, 4).bfloat16(),
        torch.rand(3, 4, dtype=torch.complex64).conj(),
        torch.tensor(3),
        torch.zeros(0, 2),
        torch.rand(6, 4)[::2],
    ],
)
def test_a_digest_is_of_elements_and_not_of_memory(tensor: Tensor) -> None:
    assert tensor_digest(tensor) == tensor_digest(tensor.resolve_conj().contiguous().clone())
    if tensor.numel():
        assert tensor_digest(tensor) != tensor_digest(tensor + 1)
        assert tensor_digest(tensor) != tensor_digest(tensor[None])


@pytest.mark.parametrize("factory", [nets.TensorAttributes, nets.Unscriptable, nets.Attention])
def test_fingerprint_ignores_weights(factory: type[nn.Module]) -> None:
    x = torch.rand(2, 4, 16) if factory is nets.Attention else torch.rand(2, 4)
    one, other = (capture(factory().eval(), (x,), {}).fingerprint for _ in range(2))
    assert one == other


@pytest.mark.parametrize("wrap", [lambda module: module, nets.Starred])
def test_tied_weights_are_noted(wrap: Any) -> None:
    tied, untied = nets.Tied().eval(), nets.Tied().eval()
    untied.decode.weight = nn.Parameter(torch.rand(4, 4))
    one, other = (capture(wrap(module), (X,), {}).fingerprint for module in (tied, untied))
    assert one != other


def test_training_mode_counts() -> None:
    module, x = nets.Convolutions(), torch.rand(1, 3, 8, 8)
    training = capture(module.train(), (x,), {}).fingerprint
    assert training != capture(module.eval(), (x,), {}).fingerprint


def test_locations_and_names_do_not_count() -> None:
    def make() -> type[nn.Module]:
        class Net(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * 2 + 1

        return Net

    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            doubled = x * 2

            return doubled + 1

    fingerprints = {capture(kind(), (X,), {}).fingerprint for kind in (make(), make(), Other)}
    assert len(fingerprints) == 1


def test_one_line_for_one_operation() -> None:
    lines = [capture(m, (X, X), {}).fingerprint.splitlines() for m in (Minus(), Plus())]
    assert len(lines[0]) == len(lines[1])
    changed = [(a, b) for a, b in zip(*lines, strict=True) if a != b]
    assert changed == [
        ("%2: Tensor = aten::sub.Tensor(%0, %1, 1)", "%2: Tensor = aten::add.Tensor(%0, %1, 1)")
    ]


_CHILD = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from tests.capture import nets
from tvmify.capture import capture
if sys.argv[1] == "used":
    for module in (nets.Convolutions(), nets.TensorAttributes(), nets.Attention()):
        module.heads = 8  # another type, so that the next one's name is mangled
        torch.jit.script(module)
        torch.jit.script(torch.nn.Sequential(module, torch.nn.ReLU()))
torch.manual_seed(int(sys.argv[1] == "used"))
x = torch.rand(2, 3, 10, 10)
pair = nets.Pair(x, x)
traced = torch.jit.trace(nets.Convolutions().eval(), x)
for callable_, args in (
    (nets.Convolutions().eval(), (x,)),
    (nets.Structures(), ([x], {"b": x, "a": x}, pair)),
    (nets.TensorAttributes(), (torch.rand(2, 4),)),
    (nets.Unscriptable(), (torch.rand(2, 4),)),
    (nets.plain_function, (x[0, 0], x[0, 0])),
    (traced, (x,)),
):
    program = capture(callable_, args, {})
    print(program.method)
    print(program.fingerprint)
print("sympy" in sys.modules, "tvm" in sys.modules, file=sys.stderr)
"""


def test_fingerprints_are_stable_across_processes() -> None:
    fresh = run_python(_CHILD, "fresh", PYTHONHASHSEED="1").stdout
    assert fresh.count("torchscript\n") == 5
    assert fresh.count("export\n") == 1
    assert fresh == run_python(_CHILD, "used", PYTHONHASHSEED="2").stdout


def test_scripting_does_not_import_export() -> None:
    code = (
        "import sys, torch\n"
        "from tvmify.capture import capture\n"
        "capture(torch.nn.Linear(2, 2), (torch.rand(1, 2),), {})\n"
        "assert 'sympy' not in sys.modules and 'tvm' not in sys.modules\n"
    )
    run_python(code)
