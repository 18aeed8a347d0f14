"""Which plan a product gets, whose sizes may be symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tvmify.compiler import sizes
from tvmify.compiler.costs import MATMUL
from tvmify.compiler.kernels.common import choice
from tvmify.compiler.kernels.matmul import compact, pairs
from tvmify.compiler.kernels.matmul import plan as plans
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.sizes import Size

if TYPE_CHECKING:
    from tvmify.compiler.kernels.common.sample import Sample


def plan_for(
    work: plans.Workload,
    rows: Size,
    extents: Iterable[Size],
    machine: Microarchitecture,
    bits: int,
    is_compact: bool,
    sample: Callable[[], Sample] | None,
) -> plans.Plan:
    """Choose how to cut products; the width of panels does not depend on symbolic rows."""
    if is_compact:
        return plans.single_tile(work, compact.VECTORS * machine.lanes(bits))
    if sizes.is_static(*extents):
        return plans.choose(work, machine, bits, sample)
    if work.packed:
        factor = sizes.factor(rows)
        return choice.once(plans.choose_for_any_rows, work, factor, machine, bits)
    return choice.once(plans.candidates, work, machine, bits)[0]


def workload(
    extents: tuple[Size, Size, Size, Size],
    dtype: str,
    *,
    packed: bool = True,
    paired: bool = False,
    row_stride: int = 1,
) -> plans.Workload:
    """Return the workload to choose plans for; with pairs, it has half as many steps.

    `extents` are the number of products, and the rows, columns and depth of each.
    """
    batch, rows, columns, depth = sizes.hints(extents)
    if not packed:  # what is tuned for says little about each of several symbols
        side, long = MATMUL.any_side, MATMUL.any_depth
        least = ((rows, side), (columns, side), (depth, long))
        rows, columns, depth = (
            hint if sizes.is_static(size) else max(hint, least)
            for size, (hint, least) in zip(extents[1:], least, strict=True)
        )
    steps = -(-depth // 2) if paired else depth
    kind = pairs.KIND if paired else dtype
    return plans.Workload(batch, rows, columns, steps, kind, packed, row_stride)
