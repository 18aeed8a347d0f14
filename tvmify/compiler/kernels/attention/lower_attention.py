"""Lowers fused attention to a call of its kernel, which reads operands in place. The converter
describes attention by a call of `NAME` in PyTorch's layout, with heads before positions. In most
models, operands are permutations of the results of projections, and slices, if several projections
are one product. The kernel reads through both.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import tvm
from tvm import relax
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler import sizes
from tvmify.compiler.kernels.attention.call_attention import Transposed, call_kernel
from tvmify.compiler.kernels.attention.template import Attention, Mask, Operand
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.rewriting import describes
from tvmify.compiler.passes.views import shape_of, views
from tvmify.compiler.sizes import Size

#: Name of the call that describes attention until this pass.
NAME = "tvmify.attention"
#: From heads before places to places before heads, and back.
_SWAP = [0, 2, 1, 3]


def describe(
    query: Expr,
    key: Expr,
    value: Expr,
    mask: Expr | None,
    *,
    scale: float,
    causal: bool,
    empty: float,
    fill: float | None,
) -> relax.Call:
    """Return a call that describes attention.

    Parameters
    ----------
    query, key, value
        ``[batch, heads, length, size]``; keys and values may have fewer heads, each of which is
        shared by as many heads of the queries in turn.
    mask
        With four axes that broadcast to ``[batch, heads, queries, keys]``; a bool mask says which
        keys are seen, another is added to the scores.
    scale, causal, empty, fill
        See `tvmify.compiler.kernels.attention.template.Attention`.
    """
    shape = [*query.ty.shape.values[:3], value.ty.shape.values[3]]
    options = [
        relax.const(scale, "float64"),
        relax.const(causal),
        relax.const(empty, "float32"),
        relax.const(math.nan if fill is None else fill, "float64"),
    ]
    return relax.op.call_pure_packed(
        NAME,
        *options,
        query,
        key,
        value,
        *([] if mask is None else [mask]),
        ty_args=relax.TensorType(shape, str(query.ty.dtype)),
    )


class AttentionLowering(PyExprMutator):
    """Finds the tensors that contain the operands of attention; subclasses compute it."""

    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        #: Reshaped tensors, by tensor and shape: operands that are parts of one tensor share its
        #: view.
        self.views: dict[tuple[Expr, tuple[int | str, ...]], Expr] = {}

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Replace a call that describes attention."""
        call = super().visit_call_(op)
        if not describes_attention(call):
            return call
        scale, causal, empty, fill = (constant.value.numpy().item() for constant in call.args[1:5])
        query, key, value, *masks = call.args[5:]
        key, value = self.before_repeating(key, value)
        batch, heads, _, size = shape_of(query)
        tensors, operands = zip(*(self.operand(x) for x in (query, key, value)), strict=True)
        about = Attention(
            *operands,
            mask=None,
            batch=batch,
            heads=heads,
            shared=heads // shape_of(key)[1],
            size=size,
            value_size=shape_of(value)[3],
            scale=scale,
            causal=causal,
            empty=empty,
            fill=None if math.isnan(fill) else fill,
            dtype=str(query.ty.dtype),
        )
        mask = self.narrowest(masks[0]) if masks else None
        result = self.builder_.emit(self.computed(list(tensors), about, mask))
        if any(map(sizes.is_one, about.out[1:3])):  # both orders are the same in memory
            return relax.op.reshape(result, call.ty.shape)
        return relax.op.permute_dims(result, _SWAP)

    def computed(self, tensors: list[Expr], about: Attention, mask: Expr | None) -> Expr:
        """Return the call that computes ``[batch, queries, heads, size]``.

        Parameters
        ----------
        tensors
            The tensors that the queries, keys and values are parts of.
        about
            Where they are in these tensors; without the mask.
        mask
            With four axes, each of which may be 1.
        """
        raise NotImplementedError

    def before_repeating(self, key: Expr, value: Expr) -> tuple[Expr, Expr]:
        """Return keys and values without the copies of heads that several heads of queries share.

        Models that write `repeat_kv` themselves would otherwise copy a whole cache at each step.
        """
        few = [self._before_repeating(x) for x in (key, value)]
        if None in few or not sizes.same(*(shape_of(x)[1] for x in few if x is not None)):
            return key, value
        return few[0], few[1]  # type: ignore[return-value]

    def _before_repeating(self, x: Expr) -> Expr | None:
        joined = self.value(x)
        wide = self.value(joined.args[0]) if _calls(joined, "relax.reshape") else None
        if not _calls(wide, "relax.broadcast_to"):
            return None
        narrow = wide.args[0]
        source = self.value(narrow)
        if not (_calls(source, "relax.reshape") or _calls(source, "relax.expand_dims")):
            return None
        if (len(shape_of(source.args[0])), len(shape_of(wide))) != (4, 5):
            return None
        batch, heads, *rest = shape_of(source.args[0])
        copies = shape_of(wide)[2]
        known = (
            (shape_of(narrow), (batch, heads, 1, *rest)),
            (shape_of(wide), (batch, heads, copies, *rest)),
            (shape_of(x), (batch, heads * copies, *rest)),
        )
        return source.args[0] if all(sizes.same_shape(*pair) for pair in known) else None

    def narrowest(self, mask: Expr) -> Expr:
        """Return a mask with four axes as it was before broadcasting."""
        before = self.value(mask)
        while _calls(before, "relax.broadcast_to") and len(shape_of(before.args[0])) == 4:
            mask = before.args[0]
            before = self.value(mask)
        return mask

    def operand(self, x: Expr) -> tuple[Expr, Operand]:
        """Find the tensor that contains an operand, behind permutations, reshapes and slices."""
        batch, _, length, _ = shape_of(x)
        numbers = sizes.trials()
        trials = [dict(views(x, self.value, number)) for number in numbers]
        for source in trials[0]:
            if not all(source in trial for trial in trials):
                continue
            found = {
                _placed(trial[source], math.prod(map(number, shape_of(source))))
                for trial, number in zip(trials, numbers, strict=True)
            }
            placed = found.pop()
            if placed is None or found:
                continue
            operand = Operand((batch, length, *placed.heads), first=placed.first, step=placed.step)
            if sizes.same_shape(shape_of(source), operand.shape):
                return source, operand
            if sizes.same(sizes.product(shape_of(source)), sizes.product(operand.shape)):
                return self.reshaped(source, operand.shape), operand
        return x, Operand(shape_of(x), heads_first=True)

    def reshaped(self, x: Expr, shape: tuple[Size, ...]) -> Expr:
        """Return a tensor in another shape."""
        key = (x, tuple(map(sizes.comparable, shape)))
        if key not in self.views:
            self.views[key] = self.builder_.emit(relax.op.reshape(x, shape))
        return self.views[key]

    def value(self, x: Expr) -> Expr | None:
        """Return what a variable is bound to, directly or through other variables."""
        value: Expr | None = x
        while isinstance(value, relax.Var):
            value = self.lookup_binding(value)
        return value


@compiler_pass
class LowerAttention(AttentionLowering):
    """Replace the calls that `describe` makes. The target must be current."""

    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        self.machine = Microarchitecture.current()
        self.transposed: Transposed = {}

    def computed(self, tensors: list[Expr], about: Attention, mask: Expr | None) -> Expr:
        """Return the call of the kernel."""
        if mask is not None:
            about = replace(about, mask=Mask(shape_of(mask), str(mask.ty.dtype)))
        return call_kernel(self.builder_, tensors, about, mask, self.machine, self.transposed)


def describes_attention(call: Expr) -> bool:
    """Whether an expression is a call that `describe` has made."""
    return describes(NAME, call)


def _calls(x: Expr | None, operator: str) -> bool:
    return isinstance(x, relax.Call) and x.op == tvm.ir.Op.get(operator)


class _Placed(NamedTuple):
    """The number and the size of heads in a tensor, and which of them belong to an operand."""

    heads: tuple[int, int]
    first: int
    step: int


def _placed(view: torch.Tensor, count: int) -> _Placed | None:
    """Describe heads that are adjacent in memory, positions before heads; None if they are not.

    Parameters
    ----------
    view
        ``[batch, heads, length, size]``, a view of a contiguous tensor.
    count
        The number of elements of that tensor.
    """
    batch, heads, length, size = view.shape
    if not view.numel():
        return None
    width, rest = divmod(count, batch * length)
    # The stride of an axis of one element means nothing.
    head_stride = view.stride(1) if heads > 1 else size
    wanted = (length * width, head_stride, width, 1)
    placed = all(
        n == 1 or stride == want
        for n, stride, want in zip(view.shape, view.stride(), wanted, strict=True)
    )
    first, within = divmod(int(view.storage_offset()), size)
    step, between = divmod(head_stride, size)
    if not placed or rest or width % size or within or between:
        return None
    if first + step * (heads - 1) >= width // size:
        return None
    return _Placed((width // size, size), first, step)
