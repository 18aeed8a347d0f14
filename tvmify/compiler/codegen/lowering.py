"""Scheduled TIR → LLVM's input: TVM's passes, on several functions at a time.

They take longer than LLVM (docs/measurements/startup.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.pipeline import default_s_tir_pipeline, finalize_device_passes, finalize_host_passes
from tvm.tirx.build import split_host_device_mods

from tvmify.compiler.codegen.bools_as_bytes import BoolsAsBytes
from tvmify.compiler.codegen.call_functions import CallFunctions
from tvmify.compiler.codegen.compact_allocations import CompactAllocations
from tvmify.compiler.codegen.define_pairs import DefinePairs
from tvmify.compiler.codegen.hide_extents import HideExtents
from tvmify.compiler.codegen.hoist_conditions import HoistConditions
from tvmify.compiler.codegen.join_axes import JoinAxes
from tvmify.compiler.codegen.join_indices import JoinIndices
from tvmify.compiler.codegen.narrow_indices import NarrowIndices
from tvmify.compiler.codegen.place_allocations import PlaceAllocations
from tvmify.compiler.codegen.positive_sizes import PositiveSizes
from tvmify.compiler.codegen.round_bfloat16 import RoundBfloat16
from tvmify.compiler.codegen.share_evenly import ShareEvenly
from tvmify.compiler.codegen.shuffle_loads import ShuffleLoads
from tvmify.compiler.codegen.spread_bits import SpreadBits
from tvmify.compiler.codegen.sums_on_stack import SumsOnStack
from tvmify.compiler.codegen.transpose_tiles import TransposeTiles
from tvmify.compiler.codegen.unroll_lanes import UnrollLanes
from tvmify.compiler.codegen.workarounds import BeforeLoops
from tvmify.compiler.codegen.wrap_integers import UnwrapIntegers, WrapIntegers
from tvmify.compiler.kernels.common.attributes import ASSERTS
from tvmify.system.workers import Workers
from tvmify.torch_compat.silence import silenced


class Lowered(NamedTuple):
    """Functions for the CPU, and the kernels for a GPU, if any."""

    for_cpu: tvm.IRModule
    for_gpu: tvm.IRModule | None


def lower(ir_mod: tvm.IRModule, target: tvm.target.Target, pool: Workers) -> Lowered:
    """Run TVM's own passes from schedules to LLVM's input.

    Parameters
    ----------
    pool
        Threads to use.
    """
    functions = {v: f for v, f in ir_mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    whole = tvm.IRModule(functions, attrs=ir_mod.attrs)
    whole = tirx.transform.BindTarget(target.with_host(target.host or target))(whole)
    wrapping = [WrapIntegers()] if target.host is None else []
    whole = _of_each(whole, lambda: [*wrapping, BeforeLoops()], target, pool)
    for_gpu = None
    if target.host is None:
        whole = _of_each(whole, _to_loops, target, pool)
        # These need all functions at once: one counts them, one resolves calls between them.
        packed = [tirx.transform.AnnotateEntryFunc(), tirx.transform.MakePackedAPI()]
        whole = tvm.transform.Sequential(packed)(whole)
    else:
        with target:
            whole, devices = split_host_device_mods(default_s_tir_pipeline()[0](whole))
            for_gpu = next((finalize_device_passes()(code) for code in devices.values()), None)
    lowered = _of_each(whole, _to_instructions, target, pool)
    # The remaining assertions check the arguments of every kernel, which the executor has checked
    # once; only our own (see `converters.loops`) check anything new.
    lean = tirx.transform.SkipAssert()(lowered)
    for variable, function in lowered.functions_items():
        if ASSERTS in function.attrs:
            lean.update_func(lean.get_global_var(variable.name_hint), function)
    return Lowered(lean, for_gpu)


def _of_each(
    ir_mod: tvm.IRModule,
    passes: Callable[[], list[tvm.transform.Pass]],
    target: tvm.target.Target,
    pool: Workers,
) -> tvm.IRModule:
    """Run passes on each function separately, in the threads of a pool."""

    def run(part: tvm.IRModule) -> tvm.IRModule:
        # `intrinsics` lower for the instructions of the target.
        with target, silenced():
            return tvm.transform.Sequential(passes())(part)

    parts = (tvm.IRModule({v: f}, attrs=ir_mod.attrs) for v, f in ir_mod.functions_items())
    done = [pair for part in pool.map(run, parts) for pair in part.functions_items()]
    return tvm.IRModule(dict(done), attrs=ir_mod.attrs)


def _to_loops() -> list[tvm.transform.Pass]:
    """The passes of TVM's default pipeline that concern CPUs, in its order."""
    return [
        s_tir.transform.CanonicalizeLoop(),
        s_tir.transform.LowerInitBlock(),
        PlaceAllocations(),
        s_tir.transform.ConvertBlocksToOpaque(),
        CompactAllocations(),
        s_tir.transform.LowerMatchBuffer(),
        JoinAxes(),
        s_tir.transform.StmtSimplify(),
        s_tir.transform.AnnotateIrregularLoop(),
        s_tir.transform.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(),
        RoundBfloat16(),
        tirx.transform.BF16ComputeLegalize(),
        NarrowIndices(),
        BoolsAsBytes(),
        s_tir.transform.LoopPartition(),
        JoinIndices(),
        tirx.transform.VectorizeLoop(),
        UnrollLanes(),
        TransposeTiles(),
        tirx.transform.StorageRewrite(),
        HoistConditions(),
        tirx.transform.UnrollLoop(),
        s_tir.transform.RenormalizeSplitPattern(),
        tirx.transform.StmtSimplify(),
        tirx.transform.RemoveNoOp(),
        s_tir.transform.RewriteUnsafeSelect(),
        PositiveSizes(),
        tirx.transform.CommonSubexprElim(),
        tirx.transform.FP8ComputeLegalize(),
        tirx.transform.VerifyMemory(),
    ]


def _to_instructions() -> list[tvm.transform.Pass]:
    """The passes after calls are resolved."""
    return [
        tirx.transform.FP8StorageLegalize(),
        SpreadBits(),
        tirx.transform.BF16StorageLegalize(),
        ShareEvenly(),
        ShuffleLoads(),
        SumsOnStack(),
        DefinePairs(),
        UnwrapIntegers(),
        CallFunctions(),
        HideExtents(),
        finalize_host_passes(),
    ]
