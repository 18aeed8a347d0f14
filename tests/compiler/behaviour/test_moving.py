"""Elements that change their positions: known positions, rows of pieces, lanes out of order."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from tvm import sym, tirx

from tests.compiler.programs import check, check_each, compiled, executed, with_specials
from tvmify.compiler.frontend import places

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]


@pytest.mark.parametrize(
    "positions",
    [
        [3, 2, 1, 0, 1, 2, 3, 4, 3, 2],
        [0, 0, 0, 1, 2, 3, 3],
        [5, 6, 0, 1, 2],
        [i // 2 for i in range(20)],
        [i * 7 // 20 for i in range(20)],
        [4],
        [2, 2],
        [9, 7, 5, 3],
    ],
)
def test_formula_equals_its_table(positions: list[int]):
    found = places.formula(positions)
    assert found is not None
    from_formula = [
        int(sym.Analyzer().simplify(found(tirx.const(i, "int64")))) for i in range(len(positions))
    ]
    assert from_formula == positions


def test_irregular_table_stays_a_table():
    assert places.formula([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]) is None
    assert places.formula_of(torch.tensor([0, 10]), 10) is None


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_is_moved(dtype: torch.dtype):
    x = (torch.randn(3, 5, 37) * 50).to(dtype)
    functions = {
        "strided": lambda x: x[..., 1::2],
        "third": lambda x: x[..., ::3],
        "reversed": lambda x: x.flip(-1),
        "doubled": lambda x: x.repeat_interleave(2, -1),
        "pairs": lambda x: torch.stack([x[..., 1::2], x[..., :-1:2]], -1),
        "rotated": lambda x: torch.cat([x[..., 20:], x[..., :20]], -1),
        "spread": lambda x: x[..., :1].expand(3, 5, 37).clone(),
        "chosen": lambda x: x[..., torch.tensor([0, 2, 4, 6, -1])],
    }
    artifact = compiled(lambda x: {name: f(x) for name, f in functions.items()}, x)
    results = executed(artifact, lambda x: x, x)
    assert not artifact.report["bridged"], artifact.report["bridged"]
    expected = [f(x) for f in functions.values()]
    for result, other in zip(pytree.tree_leaves(results), expected, strict=True):
        assert torch.equal(result, other)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_borders(mode: str):
    check_each(
        {
            "image": lambda x: F.pad(x, (3, 2, 1, 4), mode=mode),
            "row": lambda x: F.pad(x[0], (30, 39), mode=mode),
            "cropped": lambda x: F.pad(x, (-3, 2, 1, -4), mode=mode),
            "volume": lambda x: F.pad(x[None], (1, 1, 2, 0, 1, 3), mode=mode),
            "chain": lambda x: F.relu(F.pad(x * 2, (3, 2, 1, 4), mode=mode)),
        },
        with_specials(1, 6, 17, 41),
    )
    check(lambda x: F.pad(x, (20, 17), mode=mode), torch.randn(1, 30000))


def test_borders_and_enlarged_images_among_convolutions():
    net = nn.Sequential(
        nn.Conv2d(8, 24, 3, padding=1),
        nn.ReflectionPad2d((1, 2, 3, 1)),
        nn.Conv2d(24, 16, 3),
        nn.Upsample(scale_factor=2),
        nn.ReplicationPad2d(2),
        nn.Conv2d(16, 8, 3, stride=2),
    )
    check(net, torch.randn(2, 8, 13, 10))


@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize("size", [(26, 22), (50, 33), (7, 5)])
def test_nearest_neighbours(channels: int, size: tuple[int, int]):
    check(lambda x: F.interpolate(x, size=size, mode="nearest"), with_specials(1, channels, 13, 11))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearest_neighbours_are_found_in_the_precision_of_the_image(dtype: torch.dtype):
    def enlarge(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=(205, 166)) * 2

    x = torch.arange(20, dtype=dtype).view(1, 1, 5, 4)
    (found,) = pytree.tree_leaves(executed(compiled(enlarge, x), enlarge, x))
    assert torch.equal(found, enlarge(x))


def test_concatenations_of_rows():
    parts = [torch.randn(40, width) for width in (70, 3, 33)]
    check_each(
        {
            str(i): lambda *x, order=order: torch.cat([x[i] for i in order], -1)
            for i, order in enumerate(itertools.permutations(range(3)))
        },
        *parts,
    )


@pytest.mark.parametrize(
    ("channels", "out", "groups"),
    [(32, 32, 8), (48, 48, 4), (16, 32, 16), (64, 64, 8), (24, 24, 2)],
)
def test_groups_side_by_side(channels: int, out: int, groups: int):
    net = nn.Sequential(nn.Conv2d(channels, out, 3, padding=1, groups=groups), nn.ReLU())
    check(net, torch.randn(2, channels, 9, 15))
    check(nn.Conv2d(channels, out, (3, 1), stride=2, groups=groups), torch.randn(1, channels, 9, 7))


def test_adjacent_groups_are_independent():
    net = nn.Conv2d(32, 32, 3, padding=1, groups=8).eval()
    x = torch.randn(1, 32, 6, 20)
    x[0, 5] = float("nan")
    with torch.no_grad():
        (result,) = pytree.tree_leaves(executed(compiled(net, x), net, x))
        expected = net(x)
    assert torch.equal(result.isnan(), expected.isnan())
    assert not result[:, :4].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_extrema_of_rows_keep_nan(dtype: torch.dtype):
    x = with_specials(7, 77).to(dtype)
    x[3] = -0.0
    x[4] = float("-inf")
    functions = {
        "largest": lambda x: (x.max(-1).values, x.max(-1).indices),
        "least": lambda x: (x.min(-1).values, x.min(-1).indices),
        "across": lambda x: (x.amax(0), x.argmax(0)),
        "all": lambda x: (x.amax(), x.amin(), x.argmax()),
        "larger": lambda x: (torch.maximum(x, x.flip(0)), torch.minimum(x, x.flip(0))),
    }
    results = executed(compiled(lambda x: [f(x) for f in functions.values()], x), lambda x: x, x)
    expected = pytree.tree_leaves([f(x) for f in functions.values()])
    for result, other in zip(pytree.tree_leaves(results), expected, strict=True):
        torch.testing.assert_close(result, other, rtol=0, atol=0, equal_nan=True)


def test_rows_are_shared_out_where_a_reduction_keeps_its_axis():
    check_each(
        {
            "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
            "largest": lambda x: x - x.amax(-1, keepdim=True),
            "everything": lambda x: x - x.amax((0, 1), keepdim=True),
        },
        torch.randn(33, 65),
    )


@pytest.mark.parametrize("shape", [(24, 37), (7, 5, 12), (3, 1), (4, 33, 5), (300, 400), (3, 0, 4)])
def test_running_sums(shape: tuple[int, ...]):
    check_each(
        {
            "last": lambda x: x.cumsum(-1),
            "middle": lambda x: x.cumsum(-2),
            "integers": lambda x: (x > 0).cumsum(-1),
            "products": lambda x: torch.sign(x).cumprod(-1),
        },
        torch.randn(shape),
    )


@pytest.mark.parametrize(("shape", "axis"), [((1, 200_000), 1), ((50_000, 3), 0)])
def test_long_running_sums_are_as_exact_as_eager(shape: tuple[int, ...], axis: int):
    def running(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(axis)

    x = torch.rand(shape)
    sums = executed(compiled(running, x), running, x)
    torch.testing.assert_close(sums.double(), running(x.double()), rtol=1e-7, atol=0)
