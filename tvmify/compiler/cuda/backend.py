"""The parts of the pipeline for GPUs."""

from __future__ import annotations

import tvm
from tvm import relax

from tvmify.compiler.backend import Backend
from tvmify.compiler.cuda.attention import CallAttention
from tvmify.compiler.cuda.fuse_convolutions import FuseConvolutions
from tvmify.compiler.cuda.libraries import CallLibraries
from tvmify.compiler.cuda.products import ReshapeRows
from tvmify.compiler.cuda.reshape_transposes import ReshapeTransposes
from tvmify.compiler.cuda.rules import RULES
from tvmify.compiler.kernels.attention.merge_projections import merge_for_attention
from tvmify.compiler.kernels.common.legalizing import unless_trivial
from tvmify.compiler.kernels.elementwise import reshape
from tvmify.compiler.kernels.elementwise.keep_nan import KEEP_NAN, KEEP_NAN_IN_WARPS
from tvmify.compiler.kernels.reduction import template as sums
from tvmify.compiler.passes.cancel_transposes import CancelTransposes

CUDA = Backend(
    described=(merge_for_attention(), CancelTransposes(), CallAttention()),
    before_legalizing=tvm.transform.Sequential(
        [
            FuseConvolutions(),
            relax.transform.DeadCodeElimination(),
            ReshapeTransposes(),
            ReshapeRows(),
            relax.transform.DeadCodeElimination(),
            CallLibraries(),
            # One is a view, two would be fused into a kernel that copies.
            relax.transform.RemoveRedundantReshape(),
            relax.transform.DeadCodeElimination(),
        ]
    ),
    legalizers={
        **KEEP_NAN,
        **{name: unless_trivial(legalize) for name, legalize in KEEP_NAN_IN_WARPS.items()},
        "relax.reshape": reshape.legalize,
        "relax.sum": unless_trivial(sums.legalize_whole),
        "relax.mean": unless_trivial(sums.legalize_whole),
    },
    after_fusing=(),
    rules=RULES,
    after_scheduling=(),
)
