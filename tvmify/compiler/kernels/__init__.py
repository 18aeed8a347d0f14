"""Our CPU kernels: legalizers turn operators into loop nests, and rules schedule them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tvm import tirx

from tvmify.compiler.kernels.attention import template as attention
from tvmify.compiler.kernels.common.axes import forget_axes
from tvmify.compiler.kernels.common.bounds import bound_loops
from tvmify.compiler.kernels.common.last_block import shorten_last_blocks
from tvmify.compiler.kernels.common.prefetch import insert_prefetches
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.common.short_tiles import split_short_tiles
from tvmify.compiler.kernels.common.tails import split_tails
from tvmify.compiler.kernels.common.whole_tiles import whole_tiles
from tvmify.compiler.kernels.conv import depthwise, expanded_depthwise, pooling, transposed, volumes
from tvmify.compiler.kernels.conv import rule as conv2d
from tvmify.compiler.kernels.conv.winograd import any_size_rules
from tvmify.compiler.kernels.conv.winograd import rule as winograd_loops
from tvmify.compiler.kernels.elementwise import reshape, slices
from tvmify.compiler.kernels.elementwise.empty import Empty
from tvmify.compiler.kernels.elementwise.pieces import split_pieces
from tvmify.compiler.kernels.elementwise.rule import Elementwise
from tvmify.compiler.kernels.elementwise.shuffles import mark_shuffles
from tvmify.compiler.kernels.finish.handwritten import Handwritten
from tvmify.compiler.kernels.matmul import dots, joined, streamed
from tvmify.compiler.kernels.matmul import rule as matmul
from tvmify.compiler.kernels.matmul.pairs import add_in_place
from tvmify.compiler.kernels.reduction import cumulative, layer_norm
from tvmify.compiler.kernels.reduction import rule as reduction
from tvmify.compiler.kernels.reduction import template as sums

if TYPE_CHECKING:
    from tvm.ir import Call
    from tvm.relax import BlockBuilder, Expr

#: Legalizers for ``relax.transform.LegalizeOps``, by operator.
LEGALIZE: dict[str, Callable[[BlockBuilder, Call], Expr]] = {
    "relax.matmul": matmul.legalize,
    "relax.nn.conv2d": conv2d.legalize,
    "relax.nn.conv2d_transpose": transposed.legalize,
    "relax.nn.layer_norm": layer_norm.legalize,
    "relax.nn.max_pool2d": pooling.legalize_max,
    "relax.nn.max_pool3d": volumes.legalize,
    "relax.nn.avg_pool2d": pooling.legalize_average,
    "relax.reshape": reshape.legalize,
    "relax.strided_slice": slices.legalize,
    "relax.sum": sums.legalize,
    "relax.mean": sums.legalize,
}

#: Tried in this order; the first whose anchor is found and which succeeds schedules a function.
_RULES: tuple[Rule, ...] = (
    Empty(),
    Handwritten(attention.NAME),
    Handwritten(expanded_depthwise.NAME, again=True),
    Handwritten("lstm", again=True),
    Handwritten("gru", again=True),
    Handwritten("rnn", again=True),
    Handwritten(cumulative.SUM, again=True),
    Handwritten(cumulative.PRODUCT, again=True),
    Handwritten(streamed.NAME, again=True),
    Handwritten("scatter"),
    Handwritten("bounds check"),
    conv2d.Conv2d(),
    any_size_rules.WinogradInputs(),
    any_size_rules.WinogradResults(),
    winograd_loops.WinogradConvolution(),
    depthwise.Depthwise(),
    joined.JoinedMatmul(),
    dots.DotProducts(),
    matmul.Matmul(),
    pooling.Pooling(),
    volumes.VolumeMaximum(),
    reduction.Reduction(),
    reduction.ColumnReduction(),
    Elementwise(),
)
RULES = {rule.name: rule for rule in _RULES}


#: What changes scheduled functions where a schedule cannot, in this order.
_FINISHING: tuple[Callable[[tirx.PrimFunc], tirx.PrimFunc], ...] = (
    whole_tiles,  # reads the predicates of blocks, which the next one removes
    bound_loops,
    split_short_tiles,  # copies bodies that are still plain loops around one block
    shorten_last_blocks,  # looks for a block inside loops alone, so before prefetches
    insert_prefetches,
    forget_axes,  # the ones before it look axes up
    add_in_place,
    split_pieces,  # needs rows that are single loops, so before tails
    split_tails,  # adds conditions around the blocks that all before it look for
    mark_shuffles,  # looks at the vectors that are left
)


def finished(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Change a scheduled function where a schedule cannot."""
    for finish in _FINISHING:
        function = finish(function)
    return function
