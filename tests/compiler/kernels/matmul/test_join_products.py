"""Products of one input whose results are combined into one value are one kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.programs import check, with_specials
from tests.models import trained
from tvmify.artifact import Artifact
from tvmify.compiler.kernels.common import choice

Combine = Callable[..., Tensor]


class Gated(nn.Module):
    """Linear layers of one input, with a function that combines their results."""

    def __init__(self, combine: Combine, *layers: nn.Linear) -> None:
        super().__init__()
        self.combine = combine
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(*(layer(x) for layer in self.layers))


class Feedforward(nn.Module):
    """The feed-forward layer of Llama."""

    def __init__(self, width: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=bias)
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _kernels(artifact: Artifact) -> Counter[str]:
    """How many kernels have each rule, without views and kernels that pack weights."""
    rules: dict[str, str] = artifact.report["kernels"]
    return Counter(rule for n, rule in rules.items() if "pack" not in n and "reshape" not in n)


@pytest.mark.parametrize(
    ("shape", "inner", "bias"),
    [
        ((1, 64), 200, False),
        ((1, 64), 200, True),
        ((16, 64), 200, False),
        ((16, 64), 200, True),
        ((2, 7, 64), 200, True),
        ((2, 1, 3, 40), 70, False),
        ((1, 1, 2050), 48, True),
        ((200, 64), 2, False),
        ((130, 1100), 33, True),
    ],
)
def test_feedforward(shape: tuple[int, ...], inner: int, bias: bool):
    module = Feedforward(shape[-1], inner, bias).eval()
    x = torch.randn(*shape)
    artifact = check(module, x)
    rules = _kernels(artifact)
    assert rules.pop("joined matmul") == 1
    assert sum(rules.values()) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width", "inner"), [(1, 64, 200), (130, 33, 70)])
def test_feedforward_of_half_types(dtype: torch.dtype, rows: int, width: int, inner: int):
    module = Feedforward(width, inner, bias=True).eval().to(dtype)
    x = torch.randn(rows, width).to(dtype)
    artifact = check(module, x)
    assert _kernels(artifact)["joined matmul"] == 1


@pytest.mark.parametrize(
    ("combine", "count"),
    [
        (_swiglu, 2),
        (lambda a, b: b * F.silu(a), 2),
        (lambda a, b: a * torch.sigmoid(a) * b, 2),
        (lambda a, b: F.gelu(a) * b, 2),
        (lambda a, b: F.gelu(a, approximate="tanh") * b, 2),
        (lambda a, b: torch.relu(a) * b + 1, 2),
        (lambda a, b: torch.sigmoid(a) * torch.tanh(b), 2),
        (torch.maximum, 2),
        (lambda a, b: a.square() - b.exp() / (1 + a.abs()), 2),
        (lambda a, b, c: torch.sigmoid(a) * torch.tanh(b) + c, 3),
        (lambda a, b, c, d: (a + b) * (c - d), 4),
    ],
)
def test_any_elementwise_combination(combine: Combine, count: int):
    layers = [nn.Linear(48, 80, bias=i % 2 == 0) for i in range(count)]
    module = Gated(combine, *layers).eval()
    artifact = check(module, torch.randn(2, 9, 48))
    assert _kernels(artifact) == {"joined matmul": 1}
    assert sum(name.startswith("packed: float32") for name in artifact.packed) >= 1


@pytest.mark.parametrize("shape", [(34, 48), (2, 17, 48)], ids=str)
@pytest.mark.parametrize("ones", [0, 1, 2])
def test_broadcast_operand_is_computed_first(shape: tuple[int, ...], ones: int):
    class Scaled(nn.Module):
        """An expert of a mixture."""

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(48, 70), nn.Linear(48, 70)

        def forward(self, x: Tensor, score: Tensor) -> Tensor:
            return _swiglu(self.gate(x), self.up(x)) * torch.sigmoid(score)

    score = torch.randn(*(*shape[:-1], 70)[: len(shape) - ones], *[1] * ones)
    module, x = Scaled().eval(), torch.randn(shape)
    artifact = check(module, x, score)
    assert _kernels(artifact) == {"joined matmul": 1}


@pytest.mark.parametrize("number", range(choice.Choices().most))
@pytest.mark.parametrize("shape", [(2, 17, 64), (4, 16, 3)], ids=str)
def test_every_tiling(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], number: int):
    # Tiles of rows cross leading axes, and rows and columns beyond the last are computed, too.
    monkeypatch.setattr(choice, "settled", lambda _, found: found[min(number, len(found) - 1)])
    module = Gated(_swiglu, nn.Linear(shape[-1], 17), nn.Linear(shape[-1], 17)).eval()
    x = torch.randn(shape)
    artifact = check(module, x)
    assert _kernels(artifact)["joined matmul"] == 1


def test_a_residual_joins_them():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return x + _swiglu(self.gate(x), self.up(x))

    module, x = Residual().eval(), torch.randn(3, 5, 64)
    artifact = check(module, x)
    assert _kernels(artifact) == {"joined matmul": 1}


@pytest.mark.parametrize(
    "combine",
    [
        lambda a, b: (F.silu(a) * b, a),  # one is a result by itself
        lambda a, b: (a, b),
        lambda a, b: a.softmax(-1) * b,
        lambda a, b: a.sum(-1, keepdim=True) * b,
        lambda a, b: a @ b.mT,
        lambda a, b: torch.cat([a, b], -1),
        lambda a, b: (c := a + b, c * a),
    ],
)
def test_others_stay_apart(combine: Combine):
    module = Gated(combine, nn.Linear(48, 80), nn.Linear(48, 80)).eval()
    artifact = check(module, torch.randn(9, 48))
    assert "joined matmul" not in artifact.report["kernels"].values()


def test_products_of_other_shapes_or_inputs_stay_apart():
    widths = Gated(lambda a, b: a.relu() * b, nn.Linear(48, 80), nn.Linear(48, 1)).eval()
    assert "joined matmul" not in check(widths, torch.randn(9, 48)).report["kernels"].values()

    class Inputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(48, 80), nn.Linear(48, 80)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x).sigmoid() * self.b(y)

    artifact = check(Inputs().eval(), torch.randn(9, 48), torch.randn(9, 48))
    assert "joined matmul" not in artifact.report["kernels"].values()


def test_two_pairs_of_one_input():
    layers = [nn.Linear(48, 80) for _ in range(4)]
    module = Gated(lambda a, b, c, d: (_swiglu(a, b), torch.tanh(c) * d), *layers).eval()
    artifact = check(module, torch.randn(9, 48))
    # Both pairs have the same shape, but different epilogues.
    assert _kernels(artifact) == {"joined matmul": 2}


def test_value_read_twice_counts_once():
    layers = nn.Linear(48, 48), nn.Linear(48, 48)
    module = Gated(lambda a, b: (c := _swiglu(a, b), c @ c.mT), *layers).eval()
    artifact = check(module, torch.randn(9, 48))
    assert list(artifact.report["kernels"].values()).count("joined matmul") == 1


def test_equal_layers_share_a_kernel():
    module = nn.Sequential(*(Feedforward(64, 128) for _ in range(3))).eval()
    artifact = check(module, torch.randn(9, 64))
    assert _kernels(artifact)["joined matmul"] == 1


def test_the_same_weight_twice():
    layer = nn.Linear(48, 80)
    check(Gated(_swiglu, layer, layer).eval(), torch.randn(9, 48))


def test_nan_and_infinities_are_as_in_eager():
    gate, up = nn.Linear(9, 70), nn.Linear(9, 70)
    with torch.no_grad():
        gate.weight[3, 0], up.weight[6, 1], gate.weight[9, 2] = torch.nan, torch.inf, -torch.inf
    module = Gated(_swiglu, gate, up).eval()
    check(module, torch.randn(5, 9))
    check(module, with_specials(5, 9))


def test_batch_norms_are_in_the_weights():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Sequential(nn.Linear(48, 80), nn.BatchNorm1d(80))
            self.up = nn.Sequential(nn.Linear(48, 80), nn.BatchNorm1d(80))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.gate(x)) * self.up(x)

    module = trained(Normed())
    artifact = check(module, torch.randn(9, 48))
    rules = _kernels(artifact)
    assert (rules["joined matmul"], rules["matmul"]) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types(dtype: torch.dtype):
    module, x = Feedforward(48, 80, bias=True).eval().to(dtype), torch.randn(9, 48).to(dtype)
    artifact = check(module, x)
    # In half precision each layer casts its input, to the same.
    assert _kernels(artifact)["joined matmul"] == 1


def test_beside_attention():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(64, 64, bias=False) for _ in range(3))
            self.feedforward = Feedforward(64, 160)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                layer(x).view(2, -1, 4, 16).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return x + self.feedforward(F.rms_norm(x, (64,)))

    module, x = Block().eval(), torch.randn(2, 10, 64)
    artifact = check(module, x)
    rules = _kernels(artifact)
    assert rules["joined matmul"] == rules["attention"] == 1
    assert rules["matmul"] == 2  # all three projections, and the way back


def _heads(*columns: int) -> nn.Module:
    def results(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.sigmoid() for value in values)

    return Gated(results, *(nn.Linear(64, count) for count in columns)).eval()


@pytest.mark.parametrize(
    ("columns", "rows", "merged"),
    [
        ((5, 3), 256, True),  # in one vector, with AVX2 as well
        ((2, 1, 3, 2), 256, True),
        ((5, 3), 8, False),  # slices cost more than is saved
        ((64, 64), 256, False),
        ((1, 1), 256, False),  # sums of vectors
    ],
)
def test_narrow_heads_are_one_product(columns: tuple[int, ...], rows: int, merged: bool):
    module, x = _heads(*columns), torch.randn(rows, 64)
    artifact = check(module, x)
    rules = artifact.report["kernels"]
    assert ("split" in rules) is merged
    if merged:
        assert list(rules.values()).count("matmul") == 1


def test_narrow_heads_keep_nan_and_infinities_apart():
    check(_heads(5, 3), with_specials(256, 64))
