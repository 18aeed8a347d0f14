"""Schedules for GPUs: TVM's own rules, each function by the first that takes it."""

from __future__ import annotations

from tvm import IRModule, s_tir, tirx
from tvm.s_tir.dlight import gpu
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from tvmify.compiler.messages import first_line

#: Products and convolutions are not among them: `tvmify.compiler.cuda.libraries` has those.
RULES: dict[str, ScheduleRule] = {
    "reduction": gpu.Reduction(),
    "general reduction": gpu.GeneralReduction(),
    "fallback": gpu.Fallback(),
}


def schedule(ir_mod: IRModule, target: Target) -> tuple[IRModule, dict[str, str]]:
    """Schedule every PrimFunc of a module.

    Returns
    -------
    ir_mod
        The module with each PrimFunc scheduled.
    report
        For each PrimFunc the name of the rule that scheduled it, or ``"unscheduled"``, and after it
        which rules failed.
    """
    report: dict[str, str] = {}
    scheduled = {}
    with target:
        for variable, function in ir_mod.functions_items():
            if isinstance(function, tirx.PrimFunc):
                scheduled[variable], report[variable.name_hint] = _scheduled(function, target)
    for variable, function in scheduled.items():
        ir_mod.update_func(variable, function)
    return ir_mod, report


def _scheduled(function: tirx.PrimFunc, target: Target) -> tuple[tirx.PrimFunc, str]:
    failures = []
    for name, rule in RULES.items():
        try:
            found = rule.apply(function, target, False)
        except Exception as error:  # TVM's errors share no narrower class
            failures.append(f"{name} failed: {first_line(error)}")
            continue
        if isinstance(found, s_tir.Schedule):
            result = found.mod["main"].with_attr("tirx.is_scheduled", True)
            if _needs_workspace(result):
                failures.append(f"{name} needs memory between kernels")
                continue
            return result, name + (f" ({'; '.join(failures)})" if failures else "")
    return function, "unscheduled" + (f" ({'; '.join(failures)})" if failures else "")


def _needs_workspace(function: tirx.PrimFunc) -> bool:
    """Whether parts of a function leave each other something in global memory.

    TVM would take that from a pool of its own, which knows nothing of streams.
    """
    return any(str(buffer.scope()) == "global" for buffer in function.body.block.alloc_buffers)
