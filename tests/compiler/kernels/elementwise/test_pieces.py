"""Rows of any length: each piece has whole vectors, without conditions or divisions inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from tvm import relax, te, tirx

from tests.compiler.kernels.kernels import loops, random
from tests.compiler.symbolic import EDGES, Symbolic, build, check
from tests.tolerances import assert_close_to_reference
from tvmify import tvmify

op = relax.op
AUTO = Dim.AUTO


def vectors(program: Symbolic) -> list[tirx.For]:
    functions = [function for _, function in program.ir_mod.functions_items()]
    (kernel,) = (f for f in functions if "tirx.is_scheduled" in (f.attrs or {}))
    return [loop for loop in loops(kernel) if loop.kind == tirx.ForKind.VECTORIZED]


def padded(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    def pad(t: te.Tensor) -> Any:
        rows, columns = t.shape

        def element(i: tirx.Var, j: tirx.Var) -> Any:
            inside = tirx.all(j >= 3, j < columns + 3)
            return tirx.if_then_else(inside, t[i, j - 3], tirx.const(1.0))

        return te.compute((rows, columns + 5), element, name="pad")

    return builder.call_te(pad, x)


def from_the_end(builder: relax.BlockBuilder, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """The last elements of each row of `x`, as many as in `y`, with ones before them."""

    def element(t: te.Tensor, u: te.Tensor) -> Any:
        (rows, columns), more = t.shape, u.shape[0]
        return te.compute(
            (rows, columns),
            lambda i, j: tirx.if_then_else(columns - j <= more, t[i, j], tirx.const(1.0)),
        )

    return builder.call_te(element, x, y)


def test_borders_are_pieces() -> None:
    program = build(padded, [((5, "n"), "float32")])
    assert program.rules == {"elementwise"}
    assert not any("if_then_else" in str(loop.body.block.body) for loop in vectors(program))
    for columns in (*EDGES, 300):
        check(
            program,
            lambda x: np.pad(x, ((0, 0), (3, 2)), constant_values=1),
            [random(5, columns)],
        )


def test_a_piece_may_be_empty_or_the_whole_row() -> None:
    """It is unknown whether `few` is larger than the row."""
    program = build(from_the_end, [((3, "n"), "float32"), (("few",), "float32")])
    assert not any("if_then_else" in str(loop.body.block.body) for loop in vectors(program))

    def expected(x: Any, y: Any) -> Any:
        x = x.copy()
        x[:, : max(0, x.shape[1] - len(y))] = 1
        return x

    for few in (2, 40, 90):
        check(program, expected, [random(3, 40), random(few)])


def test_rows_of_one_piece_are_whole_vectors_and_halves() -> None:
    program = build(lambda builder, x: op.flip(x, 1), [(("rows", "n"), "float32")])
    widths = [int(loop.extent) for loop in vectors(program)]
    assert widths == sorted({*widths}, reverse=True)
    assert widths[-1] == 2
    for columns in EDGES:
        check(program, lambda x: x[:, ::-1], [random(4, columns)])


def test_places_that_matter_are_not_found_by_division() -> None:
    """Each row of a triangle has its own vectors."""

    def triangle(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        def element(t: te.Tensor) -> Any:
            zero = tirx.const(0.0)
            return te.compute(t.shape, lambda i, j: tirx.if_then_else(j <= i, t[i, j], zero))

        return builder.call_te(element, x)

    program = build(triangle, [(("rows", "n"), "float32")])
    assert all(isinstance(loop.body.iter_values[0], tirx.Var) for loop in vectors(program))
    for columns in EDGES:
        check(program, np.tril, [random(11, columns)])


class Rotary(nn.Module):
    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class Resized(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(F.pad(x, (1, 2, 3, 4)), scale_factor=2.0)


class Windows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, height, width, channels = x.shape
        x = x.view(n, height // 4, 4, width // 4, 4, channels)
        return x.transpose(2, 3).reshape(-1, 4, 4, channels)


class Blended(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2.0, mode="bilinear")


SIDES = {2: AUTO, 3: AUTO}


def test_blended_pixels_are_computed_once() -> None:
    """A separate kernel resizes each axis, and images are transposed in tiles."""
    torch.manual_seed(0)
    module = Blended().eval()
    fast = tvmify(module, dynamic_shapes=(SIDES,), cache=False, strict=True)
    for sides in ((20, 17), (33, 8), (33, 40)):
        inputs = (torch.randn(2, 20, *sides),)
        assert_close_to_reference(fast(*inputs), module, inputs, {})
    assert fast.cache_info().builds == 1
    assert "kernels: 4 (" in str(fast.explain())


@pytest.mark.parametrize(
    ("module", "axes", "shapes"),
    [
        (
            Rotary(),
            (SIDES, {0: AUTO, 1: AUTO}),
            [((2, 3, 10, 64), (10, 64)), ((2, 3, 12, 26), (12, 26)), ((2, 3, 9, 37), (9, 37))],
        ),
        (Resized(), (SIDES,), [((2, 20, 20, 17),), ((2, 20, 17, 18),), ((2, 20, 24, 40),)]),
        (
            Windows(),
            ({1: AUTO, 2: AUTO},),
            [((2, 20, 16, 24),), ((2, 16, 24, 24),), ((2, 28, 20, 24),)],
        ),
    ],
    ids=["rotary positions", "resized and padded", "windows"],
)
def test_modules_for_any_size(module: nn.Module, axes: Any, shapes: Any) -> None:
    torch.manual_seed(0)
    fast = tvmify(module.eval(), dynamic_shapes=axes, cache=False, strict=True)
    for sizes in shapes:
        inputs = tuple(torch.randn(shape) for shape in sizes)
        assert_close_to_reference(fast(*inputs), module, inputs, {})
    assert fast.cache_info().builds == 1
    # No separate kernel only moves data.
    assert "kernels: 1 (" in str(fast.explain())
