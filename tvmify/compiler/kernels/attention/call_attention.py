"""Calls the chosen attention kernel, and makes the program to measure it by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import relax, te, tirx
from tvm.ir import Expr

from tvmify.compiler import sizes
from tvmify.compiler.kernels.attention.template import Attention, Mask, choose, kernel, prepared
from tvmify.compiler.kernels.common import legalizing
from tvmify.compiler.kernels.common.sample import Sample
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.passes.views import shape_of
from tvmify.compiler.sizes import Size

#: Masks in the layout of a kernel, by the mask that they are a copy of.
Transposed = dict[tuple[Expr, Mask], Expr]


def call_kernel(
    builder: relax.BlockBuilder,
    tensors: Sequence[Expr],
    about: Attention,
    mask: Expr | None,
    machine: Microarchitecture,
    transposed: Transposed,
) -> Expr:
    """Return the call of the kernel, with the mask in its layout."""
    plan = choose(about, machine, lambda: _sample(tensors, about, mask, machine))
    operands = list(tensors)
    if mask is not None and about.mask is not None:
        wanted = prepared(about.mask, about, plan)
        # All layers of a model share one.
        if wanted != about.mask and (mask, wanted) not in transposed:
            transposed[mask, wanted] = builder.emit(_transpose(builder, mask, wanted))
        operands.append(mask if wanted == about.mask else transposed[mask, wanted])
        about = replace(about, mask=wanted)
    result = relax.TensorType(about.out, about.dtype)
    own = sizes.Variables()
    function = kernel(about.with_sizes(own), plan, machine)
    return legalizing.call_kernel(builder, function, operands, own.meaning(), result, "attention")


def _transpose(builder: relax.BlockBuilder, mask: Expr, wanted: Mask) -> Expr:
    own = sizes.Variables()

    def of(shape: Sequence[Size]) -> list[Expr]:
        # Of Relax's type: kernels that are fused must agree on the shape of what they share.
        return [tirx.const(n, "int64") if sizes.is_static(n) else n for n in own.of(shape)]

    given = te.placeholder(of(shape_of(mask)), str(mask.ty.dtype))
    last = given.shape[2] - 1
    transposed = te.compute(
        of(wanted.shape), lambda b, h, k, q: given[b, h, te.min(q, last), k], name="transposed"
    )
    # The name that TE gives it, "main", is that of the program.
    copied = te.create_prim_func([given, transposed]).without_attr("global_symbol")
    result = relax.TensorType(wanted.shape, wanted.dtype)
    return legalizing.call_kernel(builder, copied, [mask], own.meaning(), result, "lay_out_mask")


def _sample(
    tensors: Sequence[Expr], about: Attention, mask: Expr | None, machine: Microarchitecture
) -> Sample:
    """Return a program of one kernel.

    Operands have the same layouts, but are separate tensors. The mask counts as a weight, so that
    its copy, which layers share, is not timed.
    """
    masks = [] if mask is None else [mask]

    def body(builder: relax.BlockBuilder, given: list[relax.Var]) -> Expr:
        own = given[3] if masks else None
        return call_kernel(builder, given[:3], about, own, machine, {})

    def likely(x: Expr) -> relax.TensorType:
        return relax.TensorType(sizes.hints(shape_of(x)), str(x.ty.dtype))

    about = about.likely
    result = relax.TensorType(about.out, about.dtype)
    types = [*map(likely, (*tensors, *masks)), result]
    weights = (False, False, False, True)[: 3 + len(masks)]
    return Sample(types, weights, body, about.work)
