"""Lowers a pass over time of a recurrent layer to a product of all inputs and a call of a kernel.
The converter only describes it by a call of `NAME`, since the choice of the kernel decides how
states and weights are padded and packed: a program is imported once, but lowered for each choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.legalizing import call_kernel
from tvmify.compiler.kernels.common.sample import Sample
from tvmify.compiler.kernels.recurrent.plan import Plan, choose
from tvmify.compiler.kernels.recurrent.template import kernel
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.rewriting import describes, values_and_readers
from tvmify.compiler.passes.views import shape_of

#: Name of the call that describes a pass over time until this pass of the compiler.
NAME = "tvmify.recurrence"


def describe(
    x: Expr,
    first: Sequence[Expr],
    weights: Sequence[Expr],
    *,
    reverse: bool,
    is_relu: bool = False,
) -> relax.Call:
    """Return a call that describes one pass over time.

    Its result is a tuple: the states of all steps and, of an LSTM, the last cell.

    Parameters
    ----------
    x
        ``[steps, batch, inputs]``.
    first
        State and, of an LSTM, cell before the first step, ``[batch, hidden]`` each.
    weights
        Those of the inputs, those of the state, the biases of both if there are any, and those
        that project the state of an LSTM, if it does that.
    reverse
        Whether the last step is the first.
    is_relu
        Whether a layer without gates has ReLU instead of tanh.
    """
    steps, batch, _ = shape_of(x)
    _, state = shape_of(weights[1])
    dtype = str(x.ty.dtype)
    states = relax.TensorType([steps, batch, state], dtype)
    cells = [relax.TensorType([batch, shape_of(cell)[1]], dtype) for cell in first[1:]]
    return relax.op.call_pure_packed(
        NAME,
        relax.const(reverse),
        relax.const(is_relu),
        x,
        *first,
        *weights,
        ty_args=relax.TupleType([states, *cells]),
    )


@compiler_pass
class LowerRecurrent(PyExprMutator):
    """Replace the calls that `describe` makes. The target must be current."""

    def __init__(self, ir_mod: tvm.IRModule) -> None:
        super().__init__(ir_mod)
        values, _ = values_and_readers(ir_mod["main"])
        items = [value for value in values.values() if isinstance(value, relax.TupleGetItem)]
        #: Calls whose results after the first are read; that of a pass over time is its states.
        self.with_ends = [values.get(item.tuple_value) for item in items if item.index]

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Replace a call that describes a pass over time."""
        call = super().visit_call_(op)
        if not describes(NAME, call):
            return call
        reverse, is_relu, x, *others = call.args[1:]
        count = len(call.ty.fields)
        first, weights = others[:count], others[count:]
        recurrence = _Recurrence(self.builder_, x, first, weights, _value(is_relu))
        is_read = any(op.same_as(read) for read in self.with_ends)
        return recurrence.lowered(reverse=_value(reverse), cell=is_read)

    def visit_tuple_getitem_(self, op: relax.TupleGetItem) -> relax.Expr:
        """Read a result directly: building a tuple would take time in each call."""
        item = super().visit_tuple_getitem_(op)
        results = self.lookup_binding(item.tuple_value)
        return results.fields[item.index] if isinstance(results, relax.Tuple) else item


def _value(constant: relax.Constant) -> bool:
    return bool(constant.value.numpy())


class _Recurrence:
    """One pass over time; the parameters are those of `describe`."""

    def __init__(
        self,
        builder: relax.BlockBuilder,
        x: Expr,
        first: Sequence[Expr],
        weights: Sequence[Expr],
        is_relu: bool,
    ) -> None:
        self.builder, self.x, self.first = builder, x, first
        self.of_inputs, self.of_state, *others = weights
        self.biases, self.projections = others[:-1], others[-1:]
        if len(others) % 2 == 0:
            self.biases, self.projections = others, []
        steps, batch, _ = shape_of(x)
        rows, state = shape_of(self.of_state)
        hidden = shape_of(first[-1])[1]
        machine = Microarchitecture.current()
        projected = state if self.projections else 0
        own = Plan.of(steps, batch, hidden, rows // hidden, str(x.ty.dtype), machine, projected)
        own = replace(own, is_relu=is_relu)
        self.plan = choose(own, machine, lambda: _sample(own.likely))

    def lowered(self, *, reverse: bool, cell: bool) -> relax.Tuple:
        """Emit the pass, and return the results that the original call had."""
        plan, builder = self.plan, self.builder
        weights = builder.emit_te(self._packed, self.of_state, primfunc_name_hint="pack_state")
        state, *cells = self.first
        arguments = [self._projected(), weights, self._padded(state, plan.padded_state)]
        arguments += [self._padded(cell, plan.padded) for cell in cells]
        arguments += [
            builder.emit_te(self._tiled, projection, primfunc_name_hint="pack_projection")
            for projection in self.projections
        ]
        if plan.kind == "gru":
            arguments.append(self._new_bias())
        own = sizes.Variables()
        function = kernel(plan.with_sizes(own), reverse, cell)
        shapes = [(plan.steps, plan.batch, plan.padded_state), (plan.batch, plan.padded)]
        types = [relax.TensorType(shape, plan.dtype) for shape in shapes[: 1 + cell]]
        out = types if cell else types[0]
        call = call_kernel(builder, function, arguments, own.meaning(), out, plan.kind)
        results = [builder.emit(call)]
        if cell:
            (both,) = results
            results = [builder.emit(relax.TupleGetItem(both, i)) for i in range(len(types))]
        widths = [plan.state, plan.hidden]
        cut = [self._cut(result, width) for result, width in zip(results, widths, strict=False)]
        return relax.Tuple(cut)

    def _projected(self) -> relax.Expr:
        """The contribution of the inputs to all gates of all steps, ``[steps, batch, gates,
        padded]``.
        """
        plan, builder = self.plan, self.builder
        weights = builder.emit_te(
            self._transposed, self.of_inputs, primfunc_name_hint="pack_of_inputs"
        )
        product = builder.emit(relax.op.matmul(self.x, weights))
        if self.biases:
            bias = builder.emit_te(self._bias, *self.biases, primfunc_name_hint="pack_bias")
            product = builder.emit(relax.op.add(product, bias))
        shape = [plan.steps, plan.batch, plan.gates, plan.padded]
        return builder.emit(relax.op.reshape(product, shape))

    def _new_bias(self) -> relax.Expr:
        plan = self.plan
        if not self.biases:
            return self.builder.emit(relax.op.zeros([plan.padded], plan.dtype))

        def of_new(bias: te.Tensor) -> te.Tensor:
            return te.compute((plan.padded,), lambda j: self._unit(bias, 2, j))

        return self.builder.emit_te(of_new, self.biases[1], primfunc_name_hint="pack_new_bias")

    def _padded(self, state: relax.Expr, width: int) -> relax.Expr:
        missing = width - shape_of(state)[1]
        if missing == 0:
            return state
        return self.builder.emit(relax.op.nn.pad(state, [0, 0, 0, missing]))

    def _cut(self, states: relax.Expr, width: int) -> relax.Expr:
        axis = len(states.ty.shape) - 1
        if states.ty.shape[axis] == width:
            return states
        cut = relax.op.strided_slice(states, [axis], [0], [width])
        return self.builder.emit(cut)

    # ---------------------------------------------------------------- packing, of weights alone

    def _unit(self, tensor: te.Tensor, gate: Any, unit: Any, *rest: Any) -> Any:
        """An element of a weight or bias; zero for padded units."""
        hidden = self.plan.hidden
        if hidden == self.plan.padded:
            return tensor(gate * hidden + unit, *rest)
        zero = tirx.const(0, self.plan.dtype)
        inside = tensor(gate * hidden + tirx.min(unit, hidden - 1), *rest)
        return tirx.if_then_else(unit < hidden, inside, zero)

    def _transposed(self, weights: te.Tensor) -> te.Tensor:
        padded = self.plan.padded
        return te.compute(
            (weights.shape[1], self.plan.gates * padded),
            lambda k, i: self._unit(weights, i // padded, i % padded, k),
            name="transposed",
        )

    def _packed(self, weights: te.Tensor) -> te.Tensor:
        return te.compute(
            self.plan.packed_shape,
            lambda t, k, g, i: self._unit(weights, g, t * self.plan.tile + i, k),
            name="packed",
        )

    def _tiled(self, projection: te.Tensor) -> te.Tensor:
        tiles, hidden, width = self.plan.projection_shape
        state = self.plan.state

        def element(t: Any, k: Any, i: Any) -> Any:
            at = t * width + i
            zero = tirx.const(0, self.plan.dtype)
            return tirx.if_then_else(at < state, projection(tirx.min(at, state - 1), k), zero)

        return te.compute((tiles, hidden, width), element, name="tiled")

    def _bias(self, of_inputs: te.Tensor, of_state: te.Tensor) -> te.Tensor:
        padded = self.plan.padded

        def element(i: Any) -> Any:
            own = self._unit(of_inputs, i // padded, i % padded)
            other = self._unit(of_state, i // padded, i % padded)
            if self.plan.gates == 3:  # the reset gate multiplies this bias
                zero = tirx.const(0, self.plan.dtype)
                other = tirx.if_then_else(i // padded == 2, zero, other)
            return own + other

        return te.compute((self.plan.gates * padded,), element, name="bias")


def _sample(plan: Plan) -> Sample:
    """Return a program of one pass over time.

    The input has a single feature, so that the product of all inputs, which is measured separately,
    takes almost no time. But its result is as large as in the program, is padded as the candidate
    needs, and is in the caches.
    """

    def body(builder: relax.BlockBuilder, given: list[relax.Var]) -> Expr:
        x, *others = given
        first, weights = others[: len(firsts)], others[len(firsts) :]
        described = describe(x, first, weights, reverse=False, is_relu=plan.is_relu)
        results = builder.emit(described)
        return relax.TupleGetItem(results, 0)

    rows, state = plan.gates * plan.hidden, (plan.batch, plan.state)
    firsts = [state, (plan.batch, plan.hidden)] if plan.kind == "lstm" else [state]
    inputs, weights = [(plan.steps, plan.batch, 1), *firsts], [(rows, 1), (rows, plan.state)]
    weights += [(plan.projected, plan.hidden)] if plan.projected else []
    shapes = [*inputs, *weights, (plan.steps, *state)]
    types = [relax.TensorType(shape, plan.dtype) for shape in shapes]
    return Sample(types, (False,) * len(inputs) + (True,) * len(weights), body, plan.work)
