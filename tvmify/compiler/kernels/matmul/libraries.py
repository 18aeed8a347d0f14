"""The table of products with weights that PyTorch's libraries, MKL and oneDNN, may compute. A line
of `LIBRARIES` says which products a call covers, how it is emitted, and where it is used without
measurements. Otherwise it is a candidate of ``tune="quick"``, measured with a bias and an
activation: our kernels fuse both, a call only the bias. The call is one of ``tvmify.aten``, which
saved files support as well. The weight is not packed: the library reorders it in each call. A
packed weight would be an opaque tensor of oneDNN or MKL (``mkldnn::_reorder_linear_weight``, for
``mkldnn::_linear_pointwise``; ``mkl::_mkl_reorder_linear_weight``), which DLPack cannot pass and a
key cannot describe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import relax
from tvm.ir import Expr

from tvmify.compiler.aten.calls import multiply
from tvmify.compiler.costs import LIBRARY
from tvmify.compiler.kernels.common import choice
from tvmify.compiler.kernels.common.sample import Sample
from tvmify.compiler.kernels.matmul import pairs
from tvmify.compiler.kernels.matmul import plan as plans
from tvmify.compiler.microarchitecture import Microarchitecture


@dataclass(frozen=True)
class Library:
    """A call that may compute a product.

    Attributes
    ----------
    name
        In reports and measurements.
    kind
        The kind of products, as in `plans.Workload.dtype`.
    dtype
        The dtype of the operands and of the result.
    rows
        The fewest rows of a product that it may compute.
    unmeasured
        Decides whether it is used without a measurement.
    write
        Adds the product to a graph, see `tvmify.compiler.aten.calls.multiply`.
    """

    name: str
    kind: str
    dtype: str
    rows: int
    unmeasured: Callable[[plans.Workload, Microarchitecture], bool]
    write: Callable[..., Any] = multiply

    def __str__(self) -> str:
        return self.name


def _pays_by_tiles(work: plans.Workload, machine: Microarchitecture) -> bool:
    """Estimate whether AMX saves more time than the call, which reorders the weights, costs."""
    if not machine.multiplies_tiles:
        return False
    arithmetic = machine.nanoseconds(work.rows * work.depth * work.columns)
    moved = LIBRARY.again * work.columns * (2 * work.depth + work.rows)
    return arithmetic * (1 - 1 / LIBRARY.tiled) > machine.nanoseconds(0, moved) + LIBRARY.call


def _never(_: plans.Workload, __: Microarchitecture) -> bool:
    return False


#: All of them. For float32, none is so much faster that it is used without a measurement.
LIBRARIES = (
    Library("bfloat16 by aten::linear", pairs.KIND, "bfloat16", LIBRARY.rows, _pays_by_tiles),
    Library("float32 by aten::linear", "float32", "float32", LIBRARY.rows, _never),
)


def choose(
    work: plans.Workload,
    machine: Microarchitecture,
    left: Sequence[int],
    out: Sequence[int],
    transposed: bool,
) -> Library | None:
    """Return the library to compute a product with one weight; None for our own kernel.

    Parameters
    ----------
    left, out
        Shapes of the activation and of the result.
    transposed
        Whether the weight is stored as ``[columns, depth]``.
    """
    offered = [line for line in LIBRARIES if line.kind == work.dtype and work.rows >= line.rows]
    if not offered:
        return None
    first = [line for line in offered if line.unmeasured(work, machine)]
    if not (first or choice.is_collecting() or choice.is_measured()):
        return None  # skip listing our own kernels
    # The legalizer chooses which of our own kernels to compare with.
    own = choice.settled(str(work), plans.candidates(work, machine, 32))
    later = [line for line in offered if line not in first]
    order = ", weights transposed" * transposed
    sample = partial(_sample, work, offered[0].dtype, left, out, transposed)
    best = choice.choose(f"{work} or by a library{order}", [*first, own, *later], sample)
    return best if isinstance(best, Library) else None


def _sample(
    work: plans.Workload, dtype: str, left: Sequence[int], out: Sequence[int], transposed: bool
) -> Sample:
    """Return a product with a bias and an activation, like most products have."""
    is_narrow = dtype != "float32"

    def wide(builder: relax.BlockBuilder, x: Expr) -> Expr:
        return builder.emit(relax.op.astype(x, "float32")) if is_narrow else x

    def body(builder: relax.BlockBuilder, operands: list[relax.Var]) -> Expr:
        rows, weight, bias = (wide(builder, x) for x in operands)
        if transposed:
            weight = builder.emit(relax.op.permute_dims(weight))
        product = builder.emit(relax.op.matmul(rows, weight))
        result = builder.emit(relax.op.add(product, bias))
        if not is_narrow:
            return relax.op.nn.relu(result)
        result = wide(builder, builder.emit(relax.op.astype(result, dtype)))
        return relax.op.astype(builder.emit(relax.op.nn.relu(result)), dtype)

    weight = [left[-1], work.columns]
    shapes = left, weight[::-1] if transposed else weight, [work.columns], out
    types = [relax.TensorType(list(shape), dtype) for shape in shapes]
    multiply_adds = float(work.rows * left[-1] * work.columns)
    return Sample(types, (False, True, True), body, multiply_adds)
