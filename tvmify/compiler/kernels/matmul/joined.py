"""Several products of the same rows as one kernel with a common element-wise epilogue. In ``silu(x
@ a) * (x @ b)`` of Llama's layers, one task computes the same columns of all products, one panel
after the other, and applies the epilogue to their sums, which are in L1 or L2. With two kernels,
the first would write its result for the second to read, and both would fork threads and read the
rows. Panels are packed in the order in which a task reads them: columns, blocks of the reduction,
products. So one block is prefetched while the one before it is multiplied with all rows, as in any
product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from tvm import relax, s_tir, te, tirx
from tvm.ir import Expr
from tvm.s_tir.schedule import SBlockRV

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.axes import Axes
from tvmify.compiler.kernels.common.legalizing import accumulator, or_zero
from tvmify.compiler.kernels.common.loops import (
    blocks_of,
    element_count,
    parallel_if_worth,
)
from tvmify.compiler.kernels.common.patterns import Pattern
from tvmify.compiler.kernels.common.prefetch import fetch_ahead
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.common.schedule import Schedule
from tvmify.compiler.kernels.elementwise.rule import schedule_block
from tvmify.compiler.kernels.finish.epilogue import inline_chain, inline_producers
from tvmify.compiler.kernels.matmul import compact, pairs
from tvmify.compiler.kernels.matmul.planning import plan_for, workload
from tvmify.compiler.kernels.matmul.rows import flatten, stacked
from tvmify.compiler.kernels.matmul.rule import Cut, add_up_blocks, split_into_tiles
from tvmify.compiler.kernels.matmul.template import (
    ANCHOR,
    PACK,
    PARTIAL,
    Product,
)
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.sizes import Size

#: Name of the blocks that represent one of several products.
ONE = "matmul_one"
#: Attribute of a function that FuseOps should treat as element-wise.
ELEMENTWISE = "tvmify.elementwise"


@dataclass(frozen=True)
class Joined(Product):
    """Products whose right-hand sides are stacked on a first axis, all with the same rows."""

    in_registers: ClassVar[bool] = False  # registers do not hold the tiles of several products

    @classmethod
    def over(
        cls,
        left: Sequence[Size],
        right: Sequence[Size],
        count: int,
        dtype: str,
        machine: Microarchitecture,
        is_compact: bool,
        paired: bool,
    ) -> Joined:
        """Choose how to cut `count` products: like a single one, since a panel belongs to one."""
        bits = bits_of(accumulator(dtype))
        depth, columns = right
        out = (count, *left[:-1], columns)
        rows = sizes.product(left[:-1])
        work = workload((1, rows, columns, depth), dtype, paired=paired)
        sample = partial(pairs.sample_of, left, right, out[1:]) if paired else None
        plan = plan_for(work, rows, left, machine, bits, is_compact, sample)
        stack = (count, *[1] * (len(left) - 2), depth, columns)
        batch = tuple(out[axis] for axis in stacked(stack, out))
        return cls(tuple(left), stack, out, batch, rows, columns, work.depth, plan, dtype, paired)

    def pack(self, right: te.Tensor) -> te.Tensor:
        """Pack one of the matrices as ``[columns / tile, blocks, 1, block, tile]``."""
        width, length = self.plan.columns, self.plan.depth

        def element(*index: tirx.Var) -> Expr:
            tile, block, _, step, lane = index
            k, column = block * length + step, tile * width + lane
            value = self.step(lambda i: right(i, column), k)
            return or_zero(value, (column, self.columns, width), (k, self.depth, length))

        shape = -(-self.columns // width), -(-self.depth // length), 1, length, width
        return te.compute(shape, element, name=PACK)

    def row_of_panel(
        self, outer: Sequence[Expr], column_tile: Expr, block: Expr, step: Expr
    ) -> tuple[Expr, ...]:
        """Return where one step of a block of a panel is."""
        return column_tile, block, outer[0], step


def legalize(builder: relax.BlockBuilder, rows: Expr, weights: Sequence[Expr]) -> Expr:
    """Emit the products of some rows with several weights of one shape, stacked."""
    machine = Microarchitecture.current()
    left, right = (sizes.sizes_of(x.ty.shape) for x in (rows, weights[0]))
    count, dtype = element_count(left[:-1]), str(rows.ty.dtype)
    narrow = pairs.rows_of(builder, rows, weights, count, machine)
    paired = narrow is not None
    is_fixed = sizes.is_static(*left) and not paired
    is_compact = is_fixed and compact.applies(builder, count, right, dtype, machine)
    product = Joined.over(left, right, len(weights), dtype, machine, is_compact, paired)
    panels = [
        builder.emit(builder.call_te(product.pack, weight, primfunc_name_hint="pack_matmul"))
        for weight in weights
    ]
    packed = [builder.emit(relax.op.concat(panels, 2))]
    if is_compact:
        packed = compact.pack(builder, *packed)
    every = builder.call_te(
        product.with_packed,
        rows if narrow is None else narrow,
        *packed,
        primfunc_name_hint="matmul",
        primfunc_attrs=Pattern.FUSIBLE.attributes,
    )
    return builder.emit(every)


def one_of(builder: relax.BlockBuilder, every: Expr, number: int) -> Expr:
    """Return one of the products that `legalize` stacked.

    FuseOps treats it as an element-wise operator after a product, so that it fuses all of them with
    the products where they are combined into one value.
    """

    def one(every: te.Tensor) -> te.Tensor:
        return te.compute(every.shape[1:], lambda *index: every(number, *index), name=ONE)

    attributes = {ELEMENTWISE: True}
    return builder.call_te(one, every, primfunc_name_hint="matmul_one", primfunc_attrs=attributes)


class JoinedMatmul(Rule):
    """Like `Matmul`; each task computes the panels of all products in turn."""

    name = "joined matmul"
    anchors = frozenset({ONE, ANCHOR})

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule a function made by `legalize` with what follows the products."""
        inline_producers(sch, ANCHOR, keep=(PARTIAL,))
        inline_chain(sch, ANCHOR)
        names = [sch.get(block).name_hint for block in blocks_of(sch)]
        # Other readers would need the sums in memory.
        readers = [sch.get(block).name_hint for block in sch.get_consumers(sch.get_sblock(ANCHOR))]
        if readers != names[-1:]:
            return None
        sch = _with_rows_numbered(sch, sch.get_sblock(names[-1]))
        anchor, partial, last = map(sch.get_sblock, (ANCHOR, PARTIAL, names[-1]))
        cut, products = Cut.of(sch, anchor, partial), Axes.of(sch.get(anchor)).extent("batch0")
        row, column = sch.get_loops(last)
        count = sizes.number_or_expression(sch.get(row).extent)
        nest = split_into_tiles(sch, cut, row, column)
        parallel_if_worth(sch, nest.outermost, machine, cut.work)
        along = add_up_blocks(sch, partial, anchor, nest, machine, count)
        # A single tile uses each panel once.
        nearby = machine.keeps(cut.weights / products if cut.block == 1 else cut.weights)
        rows = ["row_tile"] if cut.is_narrow(products) else []
        fetch_ahead(sch, partial, along, cut.block, ["row_tile"], nearby, rows, cut.varying(count))
        # Broadcast operands are computed before.
        for name in sorted({*names} - {ANCHOR, PARTIAL, names[-1]}):
            schedule_block(sch, sch.get_sblock(name), machine, cut.work)
        return sch


def _with_rows_numbered(sch: s_tir.Schedule, last: SBlockRV) -> s_tir.Schedule:
    """Give the last block loops over rows and columns only.

    TVM recognizes tiles across leading axes only on a single loop.
    """
    *lead, _ = sizes.sizes_of(variable.dom.extent for variable in sch.get(last).iter_vars)
    if len(lead) == 1:
        return sch
    numbered = tirx.IndexMap.from_func(
        lambda *index: [flatten(index[:-1], lead), index[-1]], ndim=len(lead) + 1
    )
    sch.transform_block_layout(last, numbered)
    # The sums are read at ``row // 17 * 17 + row % 17``, where TVM recognizes no tiles, either.
    return Schedule(tirx.transform.StmtSimplify()(sch.mod))
