"""Axes that are contiguous together are merged, in programs for any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax, te, tirx

from tests.compiler.kernels.kernels import random
from tests.compiler.symbolic import build, check
from tvmify.compiler.kernels.common.merge_axes import merge_axes
from tvmify.compiler.sizes import sizes_of

op = relax.op
N, H, W = (tirx.Var(name, "int64") for name in "nhw")


def function(shape: Any, element: Any) -> tirx.PrimFunc:
    """Return a function of one tensor; `element` takes it, and returns the result."""
    x = te.placeholder(shape, name="x")
    return te.create_prim_func([x, element(x)])


def shapes(given: tirx.PrimFunc) -> list[list[str]]:
    merged = merge_axes(given)
    assert merged is not None
    return [[str(size) for size in sizes_of(p.ty.shape)] for p in merged.function.params]


def test_axes_of_an_image_are_one() -> None:
    along = te.reduce_axis((0, 8), "k")
    given = function(
        (N, 8, H, W),
        lambda x: te.compute((N, H, W), lambda n, i, j: te.sum(x[n, along, i, j], axis=along)),
    )
    # Each sum is over channels, which are not adjacent to the pixels.
    assert shapes(given) == [["n", "8", "h * w"], ["n", "h * w"]]


def test_axes_of_one_element_are_dropped() -> None:
    given = function(
        (1, N, W, 1), lambda x: te.compute((1, N, W, 1), lambda *at: x[at] + tirx.const(1.0))
    )
    assert shapes(given) == [["n * w"]] * 2


def test_a_place_that_matters_by_itself_keeps_its_axis() -> None:
    def triangle(x: te.Tensor) -> Any:
        return te.compute(
            (8, H, W),
            lambda n, i, j: tirx.if_then_else(i >= j, x[n, i, j], tirx.const(0.0)),
        )

    assert merge_axes(function((8, H, W), triangle)) is None


def test_axes_are_merged_only_where_all_tensors_have_both() -> None:
    def bias(x: te.Tensor) -> Any:
        row = te.compute((W,), lambda j: x[0, 0, j] * tirx.const(2.0), name="row")
        return te.compute((8, H, W), lambda n, i, j: x[n, i, j] + row[j])

    assert merge_axes(function((8, H, W), bias)) is None


def test_neighbours_in_another_order_are_not_merged() -> None:
    given = function((H, W), lambda x: te.compute((W, H), lambda i, j: x[j, i]))
    assert merge_axes(given) is None


def test_static_functions_are_left_alone() -> None:
    given = function((8, 7, 5), lambda x: te.compute((8, 7, 5), lambda *at: x[at] * x[at]))
    assert merge_axes(given) is None


@pytest.mark.parametrize("size", [(2, 2), (7, 9), (17, 3), (31, 16), (97, 2)])
def test_results(size: tuple[int, int]) -> None:
    """A softmax over channels, and sums over pixels."""

    def program(_: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        normal = op.nn.softmax(op.multiply(x, x), axis=1)
        return relax.Tuple([normal, op.sum(normal, axis=[2, 3])])

    def reference(x: Any) -> Any:
        e = np.exp(x * x - (x * x).max(1, keepdims=True))
        normal = e / e.sum(1, keepdims=True)
        return normal, normal.sum((2, 3))

    built = build(program, [(("n", 5, "h", "w"), "float32")])
    check(built, reference, [random(3, 5, *size)])
