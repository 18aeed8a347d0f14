"""Sums and means: what is computed, before a rule gives it loops."""

from __future__ import annotations

from tvm import relax, te, tirx, topi
from tvm.ir import Call, Expr

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common import choice
from tvmify.compiler.kernels.common.legalizing import plain
from tvmify.compiler.kernels.common.loops import element_count
from tvmify.compiler.kernels.common.sums import split_evenly
from tvmify.compiler.sizes import Size

#: Longer sums become sums of sums. If elements are alike, as after ReLU, each addition rounds the
#: same way: the variance of 640 elements had a relative error of 4e-6, and with sums of 128 at most
#: 4e-7.
LONGEST = 128


def legalize(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.sum`` and ``relax.mean`` for the rules of reductions.

    The rule splits sums along memory into partial ones. Sums across memory would be added one
    element after the other, so long ones are split here, as eager PyTorch does.
    """
    is_whole = choice.is_strict() or str(call.ty.dtype) != "float32"
    return legalize_whole(builder, call) if is_whole else _cascaded(builder, call)


def legalize_whole(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower ``relax.sum`` and ``relax.mean`` as one function; float64 where accuracy is strict."""
    if not choice.is_strict() or str(call.ty.dtype) != "float32":
        return plain(builder, call)
    axes = None if call.attrs.axis is None else [int(axis) for axis in call.attrs.axis]

    def total(x: te.Tensor) -> te.Tensor:
        result = topi.sum(topi.cast(x, "float64"), axes, bool(call.attrs.keepdims))
        if call.op.name == "relax.mean":
            along = range(len(x.shape)) if axes is None else axes
            result = _divided(result, sizes.product(x.shape[axis] for axis in along))
        return topi.cast(result, "float32")

    hint = call.op.name.partition(".")[2]
    return builder.call_te(total, call.args[0], primfunc_name_hint=hint)


def _cascaded(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower a sum across memory as sums of sums, none of them longer than `LONGEST`."""
    x = call.args[0]
    shape = sizes.sizes_of(x.ty.shape)
    given = range(len(shape)) if call.attrs.axis is None else call.attrs.axis
    axes = sorted(int(axis) % len(shape) for axis in given)
    along = [axis for axis, size in enumerate(shape) if not sizes.is_one(size)][-1:]
    count = sizes.product(shape[axis] for axis in axes)
    last_run = [axis for axis in axes if all(i in axes for i in range(axis, len(shape)))]
    if last_run and last_run != axes and not sizes.is_static(*(shape[i] for i in last_run)):
        # A loop over several axes that are no neighbours would divide by their sizes.
        x = builder.emit(builder.call_te(topi.sum, x, last_run, True, primfunc_name_hint="sum"))
        shape = sizes.sizes_of(x.ty.shape)
    elif not axes or along == axes[-1:] or element_count(shape[i] for i in axes) <= LONGEST:
        return plain(builder, call)
    while element_count(shape[axis] for axis in axes) > LONGEST:
        whole, length = [], 1
        for axis in reversed(axes):
            if length * sizes.hint(shape[axis]) > LONGEST:
                break
            whole.append(axis)
            length *= sizes.hint(shape[axis])
        if length == 1:  # the axis alone is too long
            longest = max(axes, key=lambda axis: sizes.hint(shape[axis]))
            x = builder.emit(builder.call_te(_in_blocks, x, longest, primfunc_name_hint="sum"))
        else:
            x = builder.emit(builder.call_te(topi.sum, x, whole, True, primfunc_name_hint="sum"))
        shape = sizes.sizes_of(x.ty.shape)

    def last(x: te.Tensor, count: Size = count) -> te.Tensor:
        total = topi.sum(x, axes, bool(call.attrs.keepdims))
        return _divided(total, count) if call.op.name == "relax.mean" else total

    given = [] if isinstance(count, int) else [count]  # TVM gives functions symbols of their own
    return builder.call_te(last, x, *given, primfunc_name_hint=call.op.name.partition(".")[2])


def _divided(total: te.Tensor, count: Size) -> te.Tensor:
    """Return sums divided by the number of their elements."""
    number = sizes.as_number(count, str(total.dtype))
    return te.compute(total.shape, lambda *i: total(*i) / number, name="mean")


def _in_blocks(x: te.Tensor, axis: int) -> te.Tensor:
    """Return the sums of blocks along an axis; the last block may be shorter."""
    shape = sizes.sizes_of(x.shape)
    size, length = shape[axis], split_evenly(sizes.hint(shape[axis]), LONGEST)
    shape[axis] = sizes.ceil_div(size, length)
    along = te.reduce_axis((0, length), "k")

    def element(*i: Expr) -> Expr:
        at = i[axis] * length + along
        if isinstance(size, int) and size % length == 0:
            return te.sum(x(*i[:axis], at, *i[axis + 1 :]), axis=along)
        value = x(*i[:axis], tirx.min(at, size - 1), *i[axis + 1 :])
        return te.sum(tirx.if_then_else(at < size, value, tirx.const(0, x.dtype)), axis=along)

    return te.compute(shape, element, name="blocks")
