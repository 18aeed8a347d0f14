"""The template of a matrix product: the computation, in terms of tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from tvm import te, tirx
from tvm.ir import Expr

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.attributes import DEPTH, ROWS_FIRST
from tvmify.compiler.kernels.common.axes import LANE, ROW, named
from tvmify.compiler.kernels.common.last_block import open_ended
from tvmify.compiler.kernels.common.legalizing import accumulator, or_zero
from tvmify.compiler.kernels.matmul import compact, pairs
from tvmify.compiler.kernels.matmul import plan as plans
from tvmify.compiler.kernels.matmul.planning import plan_for, workload
from tvmify.compiler.kernels.matmul.rows import align, flatten, not_one, stacked, unflatten
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.sizes import Size

#: Names of the template's blocks: rows times a gate, an image whose windows are rows, the copy of
#: the right-hand side, the tile of sums over a block of the reduction, the sum of those, its rows
#: numbered through, and the result.
GATED, PAD, PACK = "matmul_gated", "matmul_pad", "matmul_pack"
PARTIAL, ANCHOR = "matmul_partial", "matmul_tile"
ROWS, STORE = "matmul_rows", "matmul_store"
#: Annotation of the tile of sums: `plans.Plan.block`.
BLOCK = "tvmify.block"


@dataclass(frozen=True)
class Product:
    """One matrix product, cut into tiles.

    Attributes
    ----------
    left, right, out
        Shapes of the operands and of the result.
    batch
        Extents of the leading axes along which there are several products, because the right-hand
        side has several matrices.
    rows, columns, depth
        Extents of one product. All rows that are multiplied by the same matrix form one axis.
    paired
        Whether a step of the reduction, of which there are `depth`, is a pair of bfloat16 numbers.
    """

    left: tuple[Size, ...]
    right: tuple[Size, ...]
    out: tuple[Size, ...]
    batch: tuple[Size, ...]
    rows: Size
    columns: Size
    depth: Size
    plan: plans.Plan
    dtype: str
    paired: bool = False

    #: Whether the sums of a whole reduction may stay in registers until they are stored.
    in_registers: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        left: Sequence[Size],
        right: Sequence[Size],
        out: Sequence[Size],
        dtype: str,
        machine: Microarchitecture,
        *,
        packed: bool = True,
        is_compact: bool = False,
        paired: bool = False,
        row_stride: int = 1,
    ) -> Product:
        """Choose how to number the rows, and how to cut.

        `packed` says that `right` is a weight, `is_compact` that it is stored as `compact` does;
        `row_stride` is that of `plans.Workload`.
        """
        bits = bits_of(accumulator(dtype))
        several = stacked(right, out)
        batch = tuple(out[axis] for axis in several)
        rows = sizes.product(out[axis] for axis in range(len(out) - 1) if axis not in several)
        columns, depth = out[-1], left[-1]
        work = workload(
            (sizes.product(batch), rows, columns, depth),
            dtype,
            packed=packed,
            paired=paired,
            row_stride=row_stride,
        )
        sample = partial(pairs.sample_of, left, right, out) if paired else None
        plan = plan_for(work, rows, (*out, depth), machine, bits, is_compact, sample)
        steps = sizes.ceil_div(depth, 2) if paired else depth
        shapes = tuple(left), tuple(right), tuple(out)
        return cls(*shapes, batch, rows, columns, steps, plan, dtype, paired)

    def step(self, numbers: Callable[[Expr], Expr], k: Expr) -> Expr:
        """Return the factors of a step of the reduction: a number, or a pair, of each tensor."""
        if not self.paired:
            return numbers(k).astype(accumulator(self.dtype))
        first, second = (numbers(2 * k + i).astype("float32") for i in (0, 1))
        return pairs.word(first, or_zero(second, (2 * k + 1, self.left[-1], 2)))

    def pack(self, right: te.Tensor) -> te.Tensor:
        """Pack matrices as ``[…, columns / tile, depth, tile]``, padded with zeros."""
        width = self.plan.columns
        lead = self.right[:-2]

        def element(*index: tirx.Var) -> Expr:
            *outer, tile, k, lane = index
            column = tile * width + lane
            value = self.step(lambda i: right(*outer, i, column), k)
            return or_zero(value, (column, self.columns, width))

        shape = (*lead, sizes.ceil_div(self.columns, width), self.depth, width)
        return te.compute(shape, element, name=PACK)

    def pack_pointwise(self, kernel: te.Tensor) -> te.Tensor:
        """Pack the weights of a 1×1 convolution, ``[columns, 1, 1, depth]``."""
        transposed = (self.left[-1], self.columns)
        return self.pack(te.compute(transposed, lambda i, o: kernel[o, 0, 0, i], name="transposed"))

    def row_of_panel(
        self, outer: Sequence[Expr], column_tile: Expr, block: Expr, step: Expr
    ) -> tuple[Expr, ...]:
        """Return the index, in what `pack` returns, of one step of a block of a panel."""
        along = block * self.plan.depth + step
        return *align(outer, self.right[:-2]), column_tile, along

    def element(self, left: te.Tensor, at: Sequence[Expr], block: Expr, step: Expr) -> Expr:
        """Return the element of a row that one step of a block multiplies."""
        return self.step(lambda i: left(*at, i), block * self.plan.depth + step)

    def with_both(self, left: te.Tensor, right: te.Tensor) -> te.Tensor:
        """The product of two activations; the kernel packs one of them."""
        own = self._with_symbols_of(left, right)
        return own.with_packed(left, own.pack(right))

    def with_gated(self, image: te.Tensor, gate: te.Tensor, packed: te.Tensor) -> te.Tensor:
        """The product of an image, whose pixels are the rows, after it is multiplied by a gate.

        The gate, ``[batch, 1, 1, depth]``, is the same for all pixels, one axis of `left`.
        """
        own = self._with_symbols_of(image)

        def element(row: tirx.Var, k: tirx.Var) -> Expr:
            b, y, x = unflatten(row, own.out[:-1])
            return image[b, y, x, k] * gate[b, 0, 0, k]

        return own.with_packed(te.compute(own.left, element, name=GATED), packed)

    def with_packed(
        self, left: te.Tensor, packed: te.Tensor, scales: te.Tensor | None = None
    ) -> te.Tensor:
        """The product with a right-hand side in tiles, compact ones if they have scales."""
        return self._with_symbols_of(left)._tiled(left, packed, scales)

    def _with_symbols_of(self, *tensors: te.Tensor) -> Product:
        """Return the product in the symbols of a function's tensors, which TVM may have renamed."""
        mine = sizes.product((*self.left, *self.right, *self.out))
        if sizes.is_static(mine):
            return self
        shapes = (size for tensor in tensors for size in tensor.shape)
        known = {
            variable.name: variable for size in shapes for variable in sizes.variables_of(size)
        }

        def own(size: Size) -> Size:
            return size if isinstance(size, int) else sizes.with_variables(size, known)

        shapes = (tuple(map(own, each)) for each in (self.left, self.right, self.out, self.batch))
        left, right, out, batch = shapes
        rows, columns, depth = map(own, (self.rows, self.columns, self.depth))
        return replace(
            self,
            left=left,
            right=right,
            out=out,
            batch=batch,
            rows=rows,
            columns=columns,
            depth=depth,
        )

    def _tiled(
        self, left: te.Tensor, packed: te.Tensor, scales: te.Tensor | None = None
    ) -> te.Tensor:
        axes = stacked(self.right, self.out)
        through = [axis for axis in range(len(self.out) - 1) if axis not in axes]
        block = self._block_sum(left, packed, scales, axes, through)
        return self._stored(self._summed(block), axes, through)

    def _block_sum(
        self,
        left: te.Tensor,
        packed: te.Tensor,
        scales: te.Tensor | None,
        axes: list[int],
        through: list[int],
    ) -> Callable[..., Expr]:
        """Return a function that adds up one block of the reduction, for an element of a tile.

        It takes the index of the block, and then that of the element. `axes` and `through` are
        those of `_stored`.
        """
        rows = self.plan.rows
        heights = [self.out[axis] for axis in through]
        k = te.reduce_axis((0, self.plan.depth), "k")
        is_symbolic = not sizes.is_static(self.rows)
        has_tail = rows > 1 if is_symbolic else self._row_tiles() * rows > self.rows

        def block(*index: Expr) -> Expr:
            step, *batch, row_tile, column_tile, row, lane = index
            row = row_tile * rows + row
            if has_tail:  # beyond the last row, read it again
                row = tirx.min(row, self.rows - 1)
            places = dict(zip((*axes, *through), (*batch, *unflatten(row, heights)), strict=True))
            *outer, own = (places[axis] for axis in sorted(places))
            if len(self.left) > 2:  # otherwise its rows are one axis already
                row = own
            at = *align(outer, self.left[:-2]), row
            element = self.element(left, at, step, k)
            where = self.row_of_panel(outer, column_tile, step, k)
            if self.paired:
                return te.sum(pairs.dot(element, packed(*where, lane)), axis=k)
            if scales is None:
                return te.sum(element * packed(*where, lane), axis=k)
            # Not the element times the scale, which may overflow where the product does not.
            return te.sum(element * (scales(*where) * compact.unpack(packed, where, lane)), axis=k)

        return block

    def _summed(self, block: Callable[..., Expr]) -> te.Tensor:
        """Return the tiles of sums, given the sum of each block of the reduction."""
        plan = self.plan
        batch = [f"batch{i}" for i in range(len(self.batch))]
        nest = (*batch, "row_tile", "column_tile", ROW, LANE)
        panels = sizes.ceil_div(self.columns, plan.columns)
        shape = (*self.batch, self._row_tiles(), panels, plan.rows, plan.columns)
        attrs = {BLOCK: plan.block, ROWS_FIRST: plan.rows_first}
        blocks = sizes.ceil_div(self.depth, plan.depth)
        if sizes.is_one(blocks):
            zero = tirx.const(0, "int64")
            name = ANCHOR if self.in_registers else PARTIAL
            tile = te.compute(
                shape, lambda *i: block(zero, *i), name=name, attrs=attrs | named(*nest, "k")
            )
            if self.in_registers:
                return tile
            return te.compute(shape, lambda *i: tile[i], name=ANCHOR, attrs=attrs | named(*nest))
        # Each block is added up in registers, then added to the sums: the panel's block stays in
        # the nearest cache, and sums of sums are more exact than one long sum.
        known = {DEPTH: self.depth} if isinstance(self.depth, int) else {}
        whole = known | open_ended(self.depth, plan.depth) | named("block", *nest, "k")
        parts = te.compute((blocks, *shape), block, name=PARTIAL, attrs=whole)
        step = te.reduce_axis((0, blocks), "step")
        return te.compute(
            shape,
            lambda *i: te.sum(parts(step, *i), axis=step),
            name=ANCHOR,
            attrs=attrs | named(*nest, "block"),
        )

    def _stored(self, sums: te.Tensor, axes: list[int], through: list[int]) -> te.Tensor:
        """Return the result: `axes` are its leading axes along which there are several right-hand
        sides, and `through` the others, whose rows are numbered through.
        """
        rows, width = self.plan.rows, self.plan.columns
        heights = [self.out[axis] for axis in through]

        def store(*index: tirx.Var) -> Expr:
            *outer, row, column = index
            at = (row // rows, column // width, row % rows, column % width)
            return sums(*outer, *at).astype(self.dtype)

        own = through if sizes.is_static(self.rows) else not_one(through, heights) or through
        if len(own) == 1:
            index = *axes, *own, -1
            names = ["row" if [axis] == own else f"axis{axis}" for axis in range(len(self.out) - 1)]
            return te.compute(
                self.out,
                lambda *i: store(*(i[axis] for axis in index)),
                name=STORE,
                attrs=named(*names, "column"),
            )
        # Rows are numbered through: only on one loop does TVM see tiles across leading axes. The
        # rule merges the two stages, with what follows, into the first.
        outer = [f"axis{axis}" for axis in axes]
        shape = *self.batch, self.rows, self.columns
        numbered = te.compute(shape, store, name=ROWS, attrs=named(*outer, "row", "column"))

        def place(*index: tirx.Var) -> Expr:
            row = flatten([index[axis] for axis in through], heights)
            return numbered(*(index[axis] for axis in axes), row, index[-1])

        names = [f"axis{axis}" for axis in range(len(self.out) - 1)]
        return te.compute(self.out, place, name=STORE, attrs=named(*names, "column"))

    def _row_tiles(self) -> Size:
        """Return the number of tiles of rows, rounded up to whole blocks if it is static."""
        tiles = sizes.ceil_div(self.rows, self.plan.rows)
        if not isinstance(tiles, int):
            return tiles
        return -(-tiles // self.plan.block) * self.plan.block
