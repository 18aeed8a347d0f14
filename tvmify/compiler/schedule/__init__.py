"""Our CPU schedules: how operators become loop nests, and loop nests fast kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx

from tvmify.compiler.schedule import (
    attention,
    conv2d,
    cumulative,
    depthwise,
    expanded_depthwise,
    joined,
    layer_norm,
    matmul,
    pooling,
    reduction,
    reshape,
    sums,
    transposed,
    winograd_loops,
)
from tvmify.compiler.schedule.axes import forget_axes
from tvmify.compiler.schedule.elementwise import Elementwise
from tvmify.compiler.schedule.empty import Empty
from tvmify.compiler.schedule.handwritten import Handwritten
from tvmify.compiler.schedule.last_block import shorten_last_blocks
from tvmify.compiler.schedule.pairs import add_in_place
from tvmify.compiler.schedule.pieces import split_pieces
from tvmify.compiler.schedule.prefetch import insert_prefetches
from tvmify.compiler.schedule.rule import Rule
from tvmify.compiler.schedule.shuffles import mark_shuffles
from tvmify.compiler.schedule.tails import split_tails

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm.ir import Call
    from tvm.relax import BlockBuilder, Expr

#: Legalizers for ``relax.transform.LegalizeOps``: operators that we lower to packed kernels.
LEGALIZE: dict[str, Callable[[BlockBuilder, Call], Expr]] = {
    "relax.matmul": matmul.legalize,
    "relax.nn.conv2d": conv2d.legalize,
    "relax.nn.conv2d_transpose": transposed.legalize,
    "relax.nn.layer_norm": layer_norm.legalize,
    "relax.nn.max_pool2d": pooling.legalize_max,
    "relax.nn.avg_pool2d": pooling.legalize_average,
    "relax.reshape": reshape.legalize,
    "relax.sum": sums.legalize,
    "relax.mean": sums.legalize,
}

#: Tried in this order; the first whose anchor is found, and which succeeds, has the function.
_RULES: tuple[Rule, ...] = (
    Empty(),
    Handwritten(attention.NAME),
    Handwritten(expanded_depthwise.NAME, again=True),
    Handwritten("lstm", again=True),
    Handwritten("gru", again=True),
    Handwritten(cumulative.SUM, again=True),
    Handwritten(cumulative.PRODUCT, again=True),
    Handwritten("scatter"),
    Handwritten("bounds check"),
    conv2d.Conv2d(),
    winograd_loops.WinogradConvolution(),
    depthwise.Depthwise(),
    joined.JoinedMatmul(),
    matmul.Matmul(),
    pooling.Pooling(),
    reduction.Reduction(),
    reduction.ColumnReduction(),
    Elementwise(),
)
RULES = {rule.name: rule for rule in _RULES}


def finished(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Do to a scheduled function what no schedule can."""
    # Tails come last: they put conditions around the blocks that the others look for.
    result = add_in_place(forget_axes(insert_prefetches(shorten_last_blocks(function))))
    return mark_shuffles(split_tails(split_pieces(result)))
