"""Operators on images, with a number of images that varies from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tvm import relax
from tvm.ir import Expr

from tests.compiler.kernels.kernels import Array, random
from tests.compiler.symbolic import build, check
from tvmify.errors import UnsupportedOperator

op = relax.op
#: Numbers of images.
BATCHES = (1, 2, 7, 8, 17, 33)


def held(
    describe: Callable[..., Expr],
    reference: Callable[..., torch.Tensor],
    image: tuple[int, int, int],
    weights: list[Array],
    *,
    rule: str,
    hint: int = 4,
) -> None:
    """Compare one program with PyTorch in float64, for several numbers of images."""

    def expected(*arrays: Array) -> Any:
        return reference(*map(torch.from_numpy, arrays)).numpy()

    program = build(
        lambda _, *given: describe(*given), [(("b", *image), "float32")], weights, hint=hint
    )
    assert rule in program.rules, program.report
    for batch in BATCHES:
        check(program, expected, [random(batch, *image, seed=batch)], weights, tolerance=1e-5)


@pytest.mark.parametrize(
    ("rule", "image", "kernel", "options"),
    [
        ("conv2d", (3, 15, 17), (16, 3, 5, 5), {"strides": 2, "padding": 2}),
        ("conv2d", (8, 9, 9), (24, 4, 3, 3), {"padding": 1, "groups": 2}),
        ("depthwise", (20, 11, 13), (20, 1, 3, 3), {"padding": 1, "groups": 20}),
        ("matmul", (16, 7, 9), (24, 16, 1, 1), {}),
        ("matmul", (16, 7, 9), (24, 16, 1, 1), {"strides": 2}),
        ("winograd", (32, 28, 28), (32, 32, 3, 3), {"padding": 1}),
        ("winograd", (64, 14, 10), (64, 64, 3, 3), {"padding": 1}),
    ],
    ids=str,
)
def test_convolutions(
    rule: str, image: tuple[int, int, int], kernel: tuple[int, ...], options: dict[str, int]
):
    weight, bias = random(*kernel, seed=1) / 8, random(kernel[0], 1, 1, seed=2)

    def describe(x: Expr, w: Expr, b: Expr) -> Expr:
        given = {
            name: value if name == "groups" else [value] * 2 for name, value in options.items()
        }
        return op.nn.relu(op.add(op.nn.conv2d(x, w, **given), b))

    def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        given = {name.replace("strides", "stride"): value for name, value in options.items()}
        return (F.conv2d(x, w, **given) + b).relu()

    held(describe, reference, image, [weight, bias], rule=rule)


@pytest.mark.parametrize(("size", "stride", "padding"), [(4, 2, 1), (2, 2, 0), (3, 2, 3)])
def test_transposed(size: int, stride: int, padding: int):
    weight = random(8, 12, size, size, seed=1)

    def describe(x: Expr, w: Expr) -> Expr:
        return op.nn.conv2d_transpose(x, w, strides=[stride] * 2, padding=[padding] * 2)

    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, w, stride=stride, padding=padding)

    rule = "matmul" if size == stride else "conv2d"
    held(describe, reference, (8, 9, 7), [weight], rule=rule)


def test_pooling():
    weight = random(16, 16, 1, 1, seed=1)

    def describe(x: Expr, w: Expr) -> Expr:
        widest = op.nn.max_pool2d(op.nn.conv2d(x, w), [3, 3], [2, 2], [1, 1])
        return op.nn.avg_pool2d(widest, [2, 2], [2, 2])

    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(F.max_pool2d(F.conv2d(x, w), 3, 2, 1), 2)

    held(describe, reference, (16, 13, 15), [weight], rule="pooling")


def test_inverted_residual():
    shapes = [(96, 16, 1, 1), (96, 1, 3, 3), (16, 96, 1, 1)]
    weights = [random(*shape, seed=i) / 5 for i, shape in enumerate(shapes)]

    def describe(x: Expr, wide: Expr, each: Expr, narrow: Expr) -> Expr:
        y = op.nn.relu(op.nn.conv2d(x, wide))
        y = op.nn.relu(op.nn.conv2d(y, each, padding=[1, 1], groups=96))
        return op.nn.conv2d(y, narrow)

    def reference(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        wide, each, narrow = given
        y = F.conv2d(F.conv2d(x, wide).relu(), each, padding=1, groups=96).relu()
        return F.conv2d(y, narrow)

    held(describe, reference, (16, 56, 56), weights, rule="expanded depthwise")


def test_images_of_any_number_of_channels_are_refused():
    def describe(_: relax.BlockBuilder, x: Expr) -> Expr:
        return op.nn.max_pool2d(x, (2, 2))

    with pytest.raises(UnsupportedOperator, match="the number of channels must be static"):
        build(describe, [((1, "c", 20, 20), "float32")])
