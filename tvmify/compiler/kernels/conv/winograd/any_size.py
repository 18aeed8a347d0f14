"""Winograd convolution of images of any height and width, as three kernels.

The first transforms the inputs of all tiles, the second is a matrix product of each point, and the
third transforms its results back. Tiles are numbered through all images, so that they are the rows
of a product, which may be any number. Intermediate results go through L2 or L3. A program for one
size has a single kernel instead, whose chunks of tiles divide the image (`template`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tvm import relax, te, tirx, topi
from tvm.ir import Expr

from tvmify.compiler import sizes
from tvmify.compiler.costs import WINOGRAD
from tvmify.compiler.kernels.common import tiles
from tvmify.compiler.kernels.common.axes import LANE, PIXEL, named
from tvmify.compiler.kernels.common.legalizing import call_template
from tvmify.compiler.kernels.common.notes import noted
from tvmify.compiler.kernels.conv.convolution import Convolution
from tvmify.compiler.kernels.conv.windows import pad
from tvmify.compiler.kernels.conv.winograd.template import (
    DATA,
    DOWN,
    EXACT,
    PAD,
    RESULT,
    STORE,
    UP,
    Winograd,
)
from tvmify.compiler.kernels.matmul import plan as plans
from tvmify.compiler.kernels.matmul.planning import workload
from tvmify.compiler.kernels.matmul.template import Product
from tvmify.compiler.microarchitecture import Microarchitecture


def candidates(convolution: Convolution, machine: Microarchitecture) -> list[AnySize]:
    """Return the kernels for a convolution; none if it has no such form."""
    window, lanes = convolution.window, machine.lanes()
    square = window.size == (3, 3) and window.dilation == (1, 1)
    known = square and convolution.groups == 1 and convolution.dtype == "float32"
    whole = convolution.out[3] % lanes == 0 and convolution.kernel[3] >= lanes
    if not known or not whole or convolution.planar or window.strides != (1, 1):
        return []
    return [AnySize.of_convolution(convolution, side, machine) for side in (2, 4)]


@dataclass(frozen=True)
class AnySize(Winograd):
    """One convolution in tiles of `height` × `width` results, a chunk being one tile.

    Attributes
    ----------
    product
        Of all points: ``[point, tile, input] × [point, input, output]``.
    """

    product: Product

    place: ClassVar[tuple[str, ...]] = ("image", "down", "across", "vector")

    @classmethod
    def of_convolution(
        cls, convolution: Convolution, side: int, machine: Microarchitecture
    ) -> AnySize:
        """Choose how to cut the product."""
        out = convolution.out
        cut: dict[str, Any] = {
            "image": convolution.image,
            "out": out,
            "window": convolution.window,
            "height": side,
            "width": side,
            "down": 1,
            "across": 1,
            "shared": True,
            "lanes": machine.lanes(),
            "planar": False,
        }
        own = Winograd(**cut, tile=tiles.Tile(1, out[3]))
        count = sizes.product((out[0], *(sizes.ceil_div(size, side) for size in out[1:3])))
        count = sizes.Variables()(sizes.simplified(count))
        left, right = (own.points, count, own.channels), (own.points, own.channels, out[3])
        product = Product.of(left, right, (own.points, count, out[3]), "float32", machine)
        plan = replace(product.plan, depth=own.depth)
        tile = tiles.Tile(plan.rows, plan.columns)
        return cls(**cut, tile=tile, product=replace(product, plan=plan))

    def nanoseconds(self, machine: Microarchitecture) -> float:
        """Estimate how long one core takes for an image of the likely size."""
        product, (points, rows, channels) = self.product, sizes.hints(self.product.left)
        work = workload((points, rows, self.out[3], channels), "float32")
        products = plans.nanoseconds(work, product.plan, machine, 32, 1)
        inputs, results = points * rows * channels, points * rows * self.out[3]
        transforms = machine.nanoseconds(WINOGRAD.input * inputs + WINOGRAD.result * results)
        moved = 4 * (inputs + results) * (WINOGRAD.stored_byte + WINOGRAD.nearby_read_byte)
        weights = 4 * points * channels * self.out[3] * WINOGRAD.weight_byte
        return WINOGRAD.margin + max(products, weights) + transforms + moved

    def call(
        self,
        builder: relax.BlockBuilder,
        image: Expr,
        weight: Expr,
        inside: tuple[Any, ...],
    ) -> Expr:
        """Call the three kernels; `inside` is the shape of the result in plain variables."""
        packed, exact = (
            builder.emit(builder.call_te(pack, weight, primfunc_name_hint=f"pack_{self.hint}"))
            for pack in self.packs
        )
        packed = builder.emit(
            builder.call_te(
                lambda w: topi.transpose(w, (1, 0, 2, 3)),
                packed,
                primfunc_name_hint="pack_by_points",
            )
        )
        n, high, wide = self.out[:3]
        grid = n, *(sizes.ceil_div(size, self.height) for size in (high, wide))
        places = sizes.Variables().of(map(sizes.simplified, grid))
        data = builder.emit(
            call_template(
                builder,
                lambda image: self.inputs(image, places),
                [image],
                (self.points, *grid, self.channels),
                (self.points, *places, self.channels),
                "winograd_inputs",
            )
        )
        count = sizes.simplified(sizes.product(grid))
        rows = relax.op.memory.view(data, relax.ShapeExpr([self.points, count, self.channels]))
        data = builder.emit(rows)  # a view: lowered to a kernel, it would be a copy
        sums = builder.emit(
            call_template(
                builder,
                self.product.with_packed,
                [data, packed],
                (self.points, count, self.out[3]),
                self.product.out,
                "winograd_products",
            )
        )
        return call_template(
            builder,
            replace(self, out=inside).results,
            [sums, image, exact],
            self.out,
            inside,
            "conv2d_winograd",
        )

    def inputs(self, image: te.Tensor, places: tuple[Any, ...]) -> te.Tensor:
        """Inputs of all tiles, transformed: ``[point, image, row, column, channel]``.

        `places` are how many images, and rows and columns of tiles, there are.
        """
        _, tall, wide = places
        pixels = tall * self.height, wide * self.width
        padded = pad(image, self.window, pixels, PAD, channels=self.channels)
        down, across = self.vertical, self.horizontal

        def half(b: Expr, ty: Expr, tx: Expr, p: Expr, x: Expr, c: Expr) -> Expr:
            row, column = ty * self.height, tx * self.width + x
            return down.data(p, lambda y: padded[b, row + y, column, c])

        shape = (*places, down.points, across.reach, self.channels)
        names = named("image", "y_tile", "x_tile", "point", "x", "channel")
        part = te.compute(shape, half, name=DOWN, attrs=names)

        def whole(p: Expr, b: Expr, ty: Expr, tx: Expr, c: Expr) -> Expr:
            row, column = p // across.points, p % across.points
            return across.data(column, lambda x: part[b, ty, tx, row, x, c])

        axes = named("point", "image", "y_tile", "x_tile", "channel")
        return te.compute(
            (self.points, *places, self.channels),
            whole,
            name=DATA,
            attrs=noted(self.chunking) | axes,
        )

    def results(self, sums: te.Tensor, image: te.Tensor, exact: te.Tensor) -> te.Tensor:
        """The result of the convolution, from sums of products of all points."""
        n, high, wide, outputs = self.out
        grid = n, sizes.ceil_div(high, self.height), sizes.ceil_div(wide, self.width)
        place = (*grid, outputs // self.lanes)
        result = self._transformed_back(sums, place)
        spoilt = self._spoilt(result)
        pixels = grid[1] * self.height, grid[2] * self.width
        direct = self._computed_directly(pad(image, self.window, pixels, PAD), exact, place)

        def store(b: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> Expr:
            tile = (b, y // self.height, x // self.width, c // self.lanes)
            index = (*tile, y % self.height, x % self.width, c % self.lanes)
            flag = spoilt(*tile, 0)
            return tirx.Select(flag == 0, result(*index), direct(*index))

        attrs = noted(self.chunking) | named(*PIXEL)
        return te.compute(self.out, store, name=STORE, attrs=attrs)

    def _transformed_back(self, sums: te.Tensor, place: tuple[Any, ...]) -> te.Tensor:
        """Return the results of each tile, ``[*place, y, x, lane]``."""
        _, down, across, _ = place
        columns = self.horizontal.points

        def product(b: Expr, ty: Expr, tx: Expr, t: Expr, p: Expr, q: Expr, lane: Expr) -> Expr:
            number = (b * down + ty) * across + tx
            return sums[p * columns + q, number, t * self.lanes + lane]

        half = te.compute(
            (*place, self.height, columns, self.lanes),
            lambda *i: self.vertical.result(i[-3], lambda p: product(*i[:-3], p, i[-2], i[-1])),
            name=UP,
            attrs=named(*self.place, "y", "point", LANE),
        )
        return te.compute(
            (*place, self.height, self.width, self.lanes),
            lambda *i: self.horizontal.result(i[-2], lambda q: half(*i[:-2], q, i[-1])),
            name=RESULT,
            attrs=named(*self.place, "y", "x", LANE),
        )

    def _computed_directly(
        self, padded: te.Tensor, exact: te.Tensor, place: tuple[Any, ...]
    ) -> te.Tensor:
        """Return the same without Winograd's transforms, from a padded image."""
        panel = self.tile.columns
        ry, rx, rc = (
            te.reduce_axis((0, extent), name)
            for extent, name in zip((3, 3, padded.shape[3]), ("ry", "rx", "rc"), strict=True)
        )

        def element(*i: Expr) -> Expr:
            b, ty, tx, t, y, x, lane = i
            channel = t * self.lanes + lane
            pixel = padded[b, ty * self.height + y + ry, tx * self.width + x + rx, rc]
            weight = exact[channel // panel, ry, rx, rc, channel % panel]
            return te.sum(pixel * weight, axis=[ry, rx, rc])

        return te.compute(
            (*place, self.height, self.width, self.lanes),
            element,
            name=EXACT,
            attrs=named(*self.place, "y", "x", LANE, "window_y", "window_x", "input"),
        )
