"""PyTorch programs with symbols in place of numbers, positions and shapes of functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.tolerances import assert_close_to_reference
from tvmify import tvmify

LENGTHS = (9, 2, 17, 33)


def _rows(*rest: int) -> list[tuple[tuple[int, ...], ...]]:
    return [((n, *rest),) for n in LENGTHS]


def _two(other: Callable[[int], int]) -> list[tuple[tuple[int, ...], ...]]:
    return [((n, 6), (other(n), 6)) for n in LENGTHS]


def _windows(x: torch.Tensor) -> torch.Tensor:
    """Return attention within windows of 4 positions; pairs of windows share masks."""
    windows = x.view(-1, 4, 6)
    scores = windows @ windows.transpose(1, 2)
    mask = torch.arange(32.0).view(2, 4, 4)
    scores = scores.view(-1, 2, 4, 4) + mask
    return scores.view(-1, 4, 4).softmax(-1) @ windows


def _masked(x: torch.Tensor) -> torch.Tensor:
    """Return attention of all rows and one more, with a mask that a kernel computes."""
    rows = torch.cat([x[:1] * 2, x])
    rows = rows.view(1, 1, x.size(0) + 1, 6)
    return F.scaled_dot_product_attention(rows, rows, rows, (rows @ rows.transpose(2, 3)).cos())


def _causal(x: torch.Tensor) -> torch.Tensor:
    """Return attention with a mask that the program makes from ones."""
    hidden = ~torch.tril(torch.ones(x.size(0), x.size(0), dtype=torch.bool))
    scores = (x @ x.T)[None].masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ x[None]


def _tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token followed by the tokens of images, and a view of that token."""
    rows = F.layer_norm(F.pad(x.flatten(2).mT, (0, 0, 1, 0)), (4,))
    return rows, rows[:, 0]


def _relative(x: torch.Tensor) -> torch.Tensor:
    """Return products of every other row with the distances between these rows."""
    rows = x[::2]
    places = torch.arange(rows.size(0) - 1, -rows.size(0), -1.0)
    return rows @ (places[:, None] * torch.arange(6)).cos().to(x.dtype).T


def _graph(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return a matrix written at computed rows and columns."""
    rows, columns = x.argmax(1), y.argmax(1)
    matrix = x.new_zeros(x.size(0) + 8, y.size(0) + 8)
    return matrix.index_put((rows, columns), x[:, 0] + 1) @ y.new_ones(y.size(0) + 8)


@pytest.fixture(autouse=True)
def _no_rule_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record for record in caplog.records if "next rule" in record.getMessage()]


@pytest.mark.parametrize(
    ("program", "shapes"),
    [
        pytest.param(lambda x: x.sum(0) / x.size(0), _rows(6), id="a number"),
        pytest.param(lambda x: x * (2 * x.size(0) - 1), _rows(6), id="a sum"),
        pytest.param(
            lambda x: torch.where(torch.arange(64) < x.size(0), 1.0, 0.5) * x.sum(),
            _rows(6),
            id="a limit",
        ),
        pytest.param(
            lambda x: x * ((x.size(0) - 1) / 4 + x.size(0) ** -0.5), _rows(6), id="a fraction"
        ),
        pytest.param(lambda x: x / math.sqrt(x.size(0)), _rows(6), id="a root"),
        pytest.param(
            lambda x: x + torch.full((1,), x.size(0) / 3), _rows(6), id="a tensor of a fraction"
        ),
        pytest.param(
            lambda x: (x * 2).repeat(x.size(0), 2) + x[:1].repeat(x.size(0) ** 2, 2),
            _rows(3),
            id="repeated",
        ),
        pytest.param(lambda x: x.var(0) + x.std(1).sum(), _rows(5), id="a variance"),
        pytest.param(
            lambda x, y: torch.einsum("id,jd->ij", x, y), _two(lambda n: n + 3), id="an einsum"
        ),
        pytest.param(
            lambda x, y: [part * 2 for part in y.split([x.size(0), y.size(0) - x.size(0)])],
            _two(lambda n: n + 4),
            id="a split",
        ),
        pytest.param(
            lambda x, y: y[x.size(0) :] * 2,  # only the size of `x` is read
            _two(lambda n: n + 4),
            id="a place",
        ),
        pytest.param(
            lambda x, y: torch.cat([y[x.size(0) :], x]) * 2, _two(lambda n: n + 4), id="joined"
        ),
        pytest.param(lambda x: F.pad(x, (0, 0, 0, 64 - x.size(0))), _rows(3), id="to a length"),
        pytest.param(lambda x: F.pad(x.T, (64 - x.size(0), 0)), _rows(3), id="to a width"),
        pytest.param(lambda x: F.pad(x, (0, 0, (-x.size(0)) % 8, 0)), _rows(3), id="to a multiple"),
        pytest.param(F.instance_norm, _rows(3, 8), id="instances"),
        pytest.param(lambda x: F.group_norm(x.transpose(0, 2), 2), _rows(4, 3), id="long groups"),
        pytest.param(
            lambda x: x.view(x.size(0) // 2, 2, 3).sum(1) * 2,
            [((2 * n, 3),) for n in LENGTHS],
            id="pairs",
        ),
        pytest.param(
            partial(F.scaled_dot_product_attention, enable_gqa=True),
            [((2, 2 * n, 5, 4), (2, n, 5, 4), (2, n, 5, 4), (1, 2 * n, 5, 5)) for n in LENGTHS],
            id="heads",
        ),
        pytest.param(
            F.scaled_dot_product_attention,
            [((1, 2, n, 4), (1, 2, n, 4), (1, 2, n, 4), (1, 1, n, n)) for n in LENGTHS],
            id="a mask of four axes",
        ),
        pytest.param(_windows, [((8 * n, 6),) for n in LENGTHS], id="attention within windows"),
        pytest.param(_masked, _rows(6), id="a computed mask"),
        pytest.param(_causal, _rows(6), id="a causal mask of ones"),
        pytest.param(_tokens, [((n, 4, n + 1, n + 2),) for n in LENGTHS], id="tokens"),
        pytest.param(_relative, _rows(6), id="relative places"),
        pytest.param(_graph, _two(lambda n: n), id="a matrix"),
        pytest.param(
            lambda x: x.sum() + torch.arange(x.size(0) - 1, -x.size(0), -1.0).cos(),
            _rows(6),
            id="distances",
        ),
        pytest.param(
            lambda x, y: torch.arange(x.size(0), x.size(0) + 9) + y.sum(0)[:1],
            _two(lambda n: n + 1),
            id="later places",
        ),
    ],
)
def test_one_program_serves_all_lengths(
    program: Callable[..., Any], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> None:
    _check(program, shapes)


def _check(program: Callable[..., Any], shapes: Sequence[Sequence[tuple[int, ...]]]) -> None:
    compiled = tvmify(program, target="llvm", dynamic=None, strict=True, cache=False)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for call in shapes:
            given = tuple(torch.randn(shape, generator=generator) for shape in call)
            assert_close_to_reference(compiled(*given), program, given)
    explained = str(compiled.explain())
    assert "serves sizes with" in explained
    assert "by PyTorch" not in explained


class _Later(nn.Module):
    """A recurrent layer over all steps but the first, with an epilogue fused into its kernel."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.steps = kind(6, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps(x[:, 1:])[0][:, :, :5].relu()


class _Spelled(nn.Module):
    """A convolution over the letters of words: the number of words is a product."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Conv1d(4, 6, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.letters(x.flatten(0, 1).transpose(1, 2)).relu().amax(2)


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        pytest.param(partial(_Later, nn.GRU), [((2, n + 1, 6),) for n in LENGTHS], id="gru"),
        pytest.param(partial(_Later, nn.LSTM), [((2, n + 1, 6),) for n in LENGTHS], id="lstm"),
        pytest.param(_Spelled, [((2, n, n + 2, 4),) for n in LENGTHS], id="convolution"),
    ],
)
def test_layers_of_computed_sizes(
    layer: Callable[[], nn.Module], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> None:
    torch.manual_seed(0)
    _check(layer().eval(), shapes)


def test_the_rows_of_slices_of_several_items_are_one_number() -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    def program(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x[:, 2:], weight.to(x.dtype))

    # Strict sums have a kernel whose last tile is computed from the number of rows.
    compiled = tvmify(program, target="llvm", accuracy="strict", strict=True, cache=False)
    with torch.inference_mode():
        for length in (5, 7, 17, 33):
            given = (torch.randn(2, length, 8, generator=torch.Generator().manual_seed(length)),)
            assert_close_to_reference(compiled(*given), program, given)
    assert "serves sizes with" in str(compiled.explain())


class Gated(nn.Module):
    """Squeeze and excitation: more tiles prefetch the weights than there are columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 24, 1), nn.Conv2d(24, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        return self.last(y * torch.sigmoid(y.mean((2, 3), keepdim=True)))


def test_one_program_serves_all_batches_of_gated_images() -> None:
    torch.manual_seed(0)
    net = Gated().eval()
    fast = tvmify(net, compare=False, strict=True)
    with torch.inference_mode():
        for batch in (2, 3, 5):
            x = torch.randn(batch, 8, 4, 4)
            assert_close_to_reference(fast(x), net, (x,), {})
    assert fast.cache_info().builds == 2
