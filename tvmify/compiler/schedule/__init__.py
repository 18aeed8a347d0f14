"""Our CPU schedules: how operators become loop nests, and loop nests fast kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx
from tvm.target import Target

from tvmify.compiler import intrinsics
from tvmify.compiler.schedule import (
    conv2d,
    depthwise,
    matmul,
    pooling,
    reduction,
    reshape,
    transposed,
    winograd_loops,
)
from tvmify.compiler.schedule.elementwise import Elementwise
from tvmify.compiler.schedule.empty import Empty
from tvmify.compiler.schedule.last_block import shorten_last_blocks
from tvmify.compiler.schedule.legalizing import RULE
from tvmify.compiler.schedule.pieces import split_pieces
from tvmify.compiler.schedule.prefetch import insert_prefetches
from tvmify.compiler.schedule.rule import Rule
from tvmify.compiler.schedule.shuffles import mark_shuffles
from tvmify.compiler.schedule.tails import split_tails

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm.ir import Call, IRModule
    from tvm.relax import BlockBuilder, Expr

#: Legalizers for ``relax.transform.LegalizeOps``: operators that we lower to packed kernels.
LEGALIZE: dict[str, Callable[[BlockBuilder, Call], Expr]] = {
    "relax.matmul": matmul.legalize,
    "relax.nn.conv2d": conv2d.legalize,
    "relax.nn.conv2d_transpose": transposed.legalize,
    "relax.nn.max_pool2d": pooling.legalize_max,
    "relax.nn.avg_pool2d": pooling.legalize_average,
    "relax.reshape": reshape.legalize,
    "relax.sum": reduction.legalize,
    "relax.mean": reduction.legalize,
}

#: Tried in this order; the first whose anchor is found, and which succeeds, has the function.
RULES: tuple[Rule, ...] = (
    Empty(),
    conv2d.Conv2d(),
    winograd_loops.WinogradConvolution(),
    depthwise.Depthwise(),
    matmul.Matmul(),
    pooling.Pooling(),
    reduction.Reduction(),
    reduction.ColumnReduction(),
    Elementwise(),
)


def schedule(ir_mod: IRModule, target: Target) -> tuple[IRModule, dict[str, str]]:
    """Schedule every PrimFunc of a module.

    Returns
    -------
    ir_mod
        The module with each PrimFunc scheduled.
    report
        For each PrimFunc the name of the rule that scheduled it, or that it brought along, or
        ``"unscheduled"``. Rules that matched but failed are named after it: ``"elementwise (matmul
        failed: …)"``.
    """
    intrinsics.register()
    report: dict[str, str] = {}
    scheduled = {}
    with target:
        for variable, function in ir_mod.functions_items():
            if isinstance(function, tirx.PrimFunc):
                result, report[variable.name_hint] = _schedule_one(function, target)
                scheduled[variable] = result
    for variable, function in scheduled.items():
        ir_mod.update_func(variable, function)
    return ir_mod, report


def _schedule_one(function: tirx.PrimFunc, target: Target) -> tuple[tirx.PrimFunc, str]:
    if RULE in function.attrs:
        return function, str(function.attrs[RULE])
    failures = []
    for rule in RULES:
        try:
            schedule_ = rule.apply(function, target, False)
        except Exception as error:  # TVM's errors share no narrower class
            message = str(error).strip().splitlines()
            failures.append(f"{rule.name} failed: {message[-1] if message else repr(error)}")
            continue
        if schedule_ is not None:
            # Tails come last: they put conditions around the blocks that the others look for.
            result = insert_prefetches(shorten_last_blocks(schedule_.mod["main"]))
            result = mark_shuffles(split_tails(split_pieces(result)))
            result = result.with_attr("tirx.is_scheduled", True)
            return result, rule.name + (f" ({'; '.join(failures)})" if failures else "")
    return function, "unscheduled" + (f" ({'; '.join(failures)})" if failures else "")
