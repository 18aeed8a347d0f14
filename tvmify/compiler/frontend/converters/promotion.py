"""Type promotion, as torch does it before an element-wise operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes
from tvm import relax
from tvm.ir import Expr

from tvmify.torch_compat.dtypes import dtype_name

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer

Value = Any


def promoted(
    importer: Importer,
    arguments: tuple[Value, ...],
    kind: PROMOTION,
    *,
    exact: Sequence[int] = (),
) -> list[relax.Expr]:
    """Return the arguments as Relax tensors in the dtype that torch computes in.

    Parameters
    ----------
    exact
        Which arguments are not rounded to the half precision of the others, if they are numbers or
        tensors without axes.
    """
    metas = [_promoting(argument) for argument in arguments]
    compute, _ = elementwise_dtypes(*metas, type_promotion_kind=kind)
    if compute is torch.bool:
        compute = torch.int8  # LLVM has no arithmetic on bools; 8 bits hold torch's results
    _, common = elementwise_dtypes(*metas, type_promotion_kind=PROMOTION.DEFAULT)
    is_half = common in (torch.bfloat16, torch.float16)
    return [
        _rounded(importer, argument, common, compute)
        if is_half and index not in exact
        else importer.tensor(argument, compute)
        for index, argument in enumerate(arguments)
    ]


def _rounded(
    importer: Importer, argument: Value, common: torch.dtype, compute: torch.dtype
) -> relax.Expr:
    if not isinstance(argument, (fx.Node, Expr)):
        return importer.tensor(float(torch.tensor(float(argument)).to(common)), compute)
    if isinstance(argument, fx.Node) and argument.meta["val"].dtype is common:
        return importer.tensor(argument, compute)
    half = relax.op.astype(importer.tensor(argument, compute), dtype_name(common))
    return importer.emit(relax.op.astype(importer.emit(half), dtype_name(compute)))


def _promoting(argument: Value) -> Any:
    """Return the arguments that decide which dtype to compute in."""
    if isinstance(argument, fx.Node):
        return argument.meta["val"]
    if isinstance(argument, Expr):  # a size, or a number computed from sizes
        return 1.0 if str(argument.ty.dtype).startswith("float") else 1
    return argument
