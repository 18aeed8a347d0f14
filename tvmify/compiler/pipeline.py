"""The passes from the imported program to fused TIR, and from scheduled TIR to the VM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import tvm
from tvm import relax, tirx
from tvm.relax.backend.cpu_generic.pipeline import finalize_passes

from tvmify.compiler.backend import Backend, Legalize
from tvmify.compiler.codegen.casts import legalize_astype
from tvmify.compiler.codegen.merge_serial import MergeSerial
from tvmify.compiler.cuda.backend import CUDA
from tvmify.compiler.kernels import LEGALIZE, RULES, finished
from tvmify.compiler.kernels.attention.lower_attention import LowerAttention
from tvmify.compiler.kernels.attention.merge_projections import merge_projections
from tvmify.compiler.kernels.common.rule import Outcome, apply_in_turn
from tvmify.compiler.kernels.conv.gate_convolutions import GateConvolutions
from tvmify.compiler.kernels.conv.join_depthwise import JoinDepthwise
from tvmify.compiler.kernels.conv.planar_images import PlanarImages
from tvmify.compiler.kernels.conv.windows import refuse_unknown_channels
from tvmify.compiler.kernels.elementwise.keep_nan import KEEP_NAN
from tvmify.compiler.kernels.elementwise.limit_copies import LimitCopies
from tvmify.compiler.kernels.elementwise.mark_injective import MarkInjective
from tvmify.compiler.kernels.finish.join_producers import JoinProducers
from tvmify.compiler.kernels.matmul.call_libraries import CallLibraries
from tvmify.compiler.kernels.matmul.join_products import JoinProducts
from tvmify.compiler.kernels.matmul.mark_elementwise import MarkElementwise
from tvmify.compiler.kernels.recurrent.lower_recurrent import LowerRecurrent
from tvmify.compiler.passes.align_ranks import AlignRanks
from tvmify.compiler.passes.bind_sizes import BindSizes, DropUnused, MergeSymbols
from tvmify.compiler.passes.cancel_transposes import CancelTransposes
from tvmify.compiler.passes.flatten_rows import FlattenRows
from tvmify.compiler.passes.fold_batch_norm import FoldBatchNorm
from tvmify.compiler.passes.lift_weights import LiftWeights
from tvmify.compiler.passes.name_kernels import NameKernels
from tvmify.compiler.passes.own_outputs import OwnOutputs
from tvmify.compiler.passes.separate_items import SeparateItems
from tvmify.compiler.passes.trust_arguments import TrustArguments
from tvmify.errors import BuildError, UnsupportedTarget, headline
from tvmify.target import Target


def _legalize_max_pool2d(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    # Ours is for channels last, the layout that ConvertLayout gives pools between convolutions.
    legalizers = LEGALIZE if str(call.attrs.layout) == "NHWC" else KEEP_NAN
    return legalizers["relax.nn.max_pool2d"](builder, call)


#: CPU replacements for TVM's legalizers that are wrong or slow.
LEGALIZERS: dict[str, Legalize] = {
    **KEEP_NAN,
    **LEGALIZE,
    "relax.astype": legalize_astype,
    "relax.nn.max_pool2d": _legalize_max_pool2d,
}

CPU = Backend(
    described=(
        LowerRecurrent(),
        FlattenRows(),  # of the products of all steps, which are new
        merge_projections(),
        CancelTransposes(),
        LowerAttention(),
    ),
    before_legalizing=tvm.transform.Sequential(
        [
            GateConvolutions(),
            JoinProducts(),
            CallLibraries(),
            relax.transform.DeadCodeElimination(),
            PlanarImages(),
        ]
    ),
    legalizers=LEGALIZERS,
    after_fusing=(JoinDepthwise(), JoinProducers()),
    rules=RULES,
    after_scheduling=(MergeSerial(),),
    finished=finished,
)
_BACKENDS = {"llvm": CPU, "cuda": CUDA}


def backend_of(target: tvm.target.Target) -> Backend:
    """Return the backend of a target."""
    return _BACKENDS[target.kind.name]


def tvm_target(target: Target) -> tvm.target.Target:
    """Return TVM's object for a target.

    Raises
    ------
    UnsupportedTarget
        TVM does not know one of its attributes.
    """
    try:
        return tvm.target.Target({"kind": target.kind, **target.attributes})
    except (TypeError, ValueError) as error:
        raise UnsupportedTarget(
            f"TVM refuses the target: {headline(error)}", "Correct the option target=."
        ) from error


def lower(
    ir_mod: tvm.IRModule,
    target: tvm.target.Target,
    legalizers: Mapping[str, Legalize] | None = None,
) -> tvm.IRModule:
    """Turn the imported program into unscheduled TIR.

    Parameters
    ----------
    ir_mod
        The imported module.
    target
        Selects the `Backend`.
    legalizers
        Used instead of the backend's.

    Returns
    -------
    tvm.IRModule
        With the Relax functions ``main(*inputs, *packed)`` and, if there are weights,
        ``pack(*weights) -> packed``.

    Raises
    ------
    UnsupportedOperator
        The number of channels of images is symbolic.
    """
    refuse_unknown_channels(ir_mod)
    backend = backend_of(target)
    passes = [
        AlignRanks(),
        FlattenRows(),
        # Scales and activations should follow a product, not its transpose or reshape.
        CancelTransposes(),
        relax.transform.DeadCodeElimination(),
        FoldBatchNorm(),
        relax.transform.DeadCodeElimination(),
        # Channels last: the layout that the convolution schedules are written for.
        relax.transform.ConvertLayout(
            {
                "relax.nn.conv2d": ["NHWC", "OHWI"],
                "relax.nn.conv2d_transpose": ["NHWC", "IOHW"],
            }
        ),
        # Absorbs the permutations around attention, and leaves one that others undo.
        *backend.described,
        CancelTransposes(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.DeadCodeElimination(),
        # Softmax, normalization … in terms of simpler operators where Relax has inference forms.
        relax.transform.DecomposeOpsForInference(),
        relax.transform.CanonicalizeBindings(),
    ]
    with target:
        return legalize(tvm.transform.Sequential(passes)(ir_mod), target, legalizers)


def legalize(
    ir_mod: tvm.IRModule,
    target: tvm.target.Target,
    legalizers: Mapping[str, Legalize] | None = None,
) -> tvm.IRModule:
    """Do the second half of `lower`: turn operators in their final layouts into TIR functions."""
    backend = backend_of(target)
    passes = [
        backend.before_legalizing,
        # Operators become calls of TIR functions; ours pack weights in a separate call.
        relax.transform.LegalizeOps(dict(legalizers or backend.legalizers)),
        relax.transform.DeadCodeElimination(),
        # Everything that depends on weights only moves into ``pack``.
        LiftWeights(),
        relax.transform.DeadCodeElimination(),
    ]
    with target:
        return tvm.transform.Sequential(passes)(ir_mod)


def fuse(ir_mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Fuse chains of TIR functions: bias, residual and activation join the kernel before them."""
    passes = [
        relax.transform.AnnotateTIROpPattern(),
        MarkElementwise(),
        MarkInjective(),
        SeparateItems(),
        LimitCopies(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        BindSizes(),
        MergeSymbols(),
        *backend_of(target).after_fusing,
        relax.transform.DeadCodeElimination(),
        # Reshapes that were not fused become views, which cost nothing …
        relax.transform.RewriteDataflowReshape(),
        DropUnused(),
        # … and must not lead out of the program to memory that is not its own.
        OwnOutputs(),
    ]
    with target:
        return tvm.transform.Sequential(passes)(ir_mod)


class Scheduled(NamedTuple):
    """A module with its functions scheduled.

    Attributes
    ----------
    ir_mod
        The module.
    outcomes
        By the name of each function: the rule that scheduled it, and rules that matched but failed.
        Their ``str`` is for reports.
    """

    ir_mod: tvm.IRModule
    outcomes: dict[str, Outcome]


def schedule(ir_mod: tvm.IRModule, target: tvm.target.Target) -> Scheduled:
    """Schedule every TIR function.

    Raises
    ------
    BuildError
        There is no schedule for a function, which the target requires.
    """
    backend = backend_of(target)
    functions = {v: f for v, f in ir_mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    scheduled, outcomes = apply_in_turn(backend.rules, functions, target)
    for variable, outcome in outcomes.items():
        if outcome.rule is not None:
            ir_mod.update_func(variable, backend.finished(scheduled[variable]))
    kernels = {variable.name_hint: outcome for variable, outcome in outcomes.items()}
    left = [name for name, outcome in kernels.items() if outcome.rule is None]
    if left and target.kind.name == "cuda":
        raise BuildError(
            f"no rule for GPUs schedules {left[0]!r}: {kernels[left[0]]}",
            "Run this module in eager PyTorch, and report the program.",
        )
    return Scheduled(ir_mod, kernels)


def plan_memory(ir_mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Turn dataflow into calls on planned memory, ready for the virtual machine."""
    passes = [
        *backend_of(target).after_scheduling,
        NameKernels(),
        # As TVM's ``dataflow_lower_passes`` without RewriteDataflowReshape, which ran before.
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        *finalize_passes(target),  # memory planning is among them
        TrustArguments(),
    ]
    with target:
        return tvm.transform.Sequential(passes)(ir_mod)
