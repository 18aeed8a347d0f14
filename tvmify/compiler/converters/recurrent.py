"""LSTM and GRU: layers of them, both directions, and single cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import fx
from tvm import relax, te, tirx

from tvmify.compiler.converters import steps
from tvmify.compiler.converters.reduction import accumulator
from tvmify.compiler.converters.registry import converts, dtype_of, refuse_on_gpu
from tvmify.compiler.schedule.microarchitecture import Microarchitecture
from tvmify.errors import UnsupportedOperator

if TYPE_CHECKING:
    from tvmify.compiler.importer import Importer

Result = tuple[relax.Expr, ...]


@converts("lstm.input", "gru.input")
def layers(importer: Importer, node: fx.Node) -> Result:
    """All layers of ``nn.LSTM`` or ``nn.GRU``: results of each step, last states, last cells."""
    refuse_on_gpu(str(node.target))
    arguments: Any = node.args
    source, initial, weights, biased, count, _, _, both, batch_first = arguments
    per_pass = 4 if biased else 2
    passes = [weights[i : i + per_pass] for i in range(0, len(weights), per_pass)]
    directions = 2 if both else 1
    if len(passes) != count * directions:
        raise UnsupportedOperator([str(node.target)], "states are projected")
    dtype = accumulator(node.meta["val"][0].dtype)
    x = importer.tensor(source, dtype)
    if batch_first:
        x = importer.emit(relax.op.permute_dims(x, [1, 0, 2]))
    firsts = initial if isinstance(initial, (list, tuple)) else [initial]
    states = [importer.tensor(first, dtype) for first in firsts]
    ends: list[Result] = []
    for layer in range(count):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = [importer.tensor(weight, dtype) for weight in passes[index]]
            first = [_at(importer, state, index) for state in states]
            output, *end = _Pass(importer, x, first, own).run(reverse=direction == 1)
            outputs.append(output)
            ends.append(tuple(end))
        x = outputs[0] if directions == 1 else importer.emit(relax.op.concat(outputs, 2))
    if batch_first:
        x = importer.emit(relax.op.permute_dims(x, [1, 0, 2]))
    return x, *(_stacked(importer, kind) for kind in zip(*ends, strict=True))


@converts("lstm_cell.default", "gru_cell.default")
def cell(importer: Importer, node: fx.Node) -> Any:
    """One step."""
    refuse_on_gpu(str(node.target))
    arguments: Any = node.args
    source, initial, *weights = arguments
    dtype = accumulator(source.meta["val"].dtype)
    x = importer.emit(relax.op.expand_dims(importer.tensor(source, dtype), 0))
    firsts = initial if isinstance(initial, (list, tuple)) else [initial]
    states = [importer.tensor(first, dtype) for first in firsts]
    own = [importer.tensor(weight, dtype) for weight in weights if weight is not None]
    _, *end = _Pass(importer, x, states, own).run(reverse=False)
    return tuple(end) if len(end) > 1 else end[0]


def _stacked(importer: Importer, parts: Result) -> relax.Expr:
    planes = [importer.emit(relax.op.expand_dims(part, 0)) for part in parts]
    return planes[0] if len(planes) == 1 else importer.emit(relax.op.concat(planes, 0))


def _at(importer: Importer, states: relax.Expr, index: int) -> relax.Expr:
    part = importer.emit(relax.op.strided_slice(states, [0], [index], [index + 1]))
    return importer.emit(relax.op.squeeze(part, [0]))


class _Pass:
    """One pass over time.

    Parameters
    ----------
    x
        ``[steps, batch, inputs]``.
    first
        State and, of an LSTM, cell before the first step, ``[batch, hidden]`` each.
    weights
        Those of the inputs, those of the state, and the biases of both if there are any.
    """

    def __init__(
        self,
        importer: Importer,
        x: relax.Expr,
        first: Sequence[relax.Expr],
        weights: Sequence[relax.Expr],
    ) -> None:
        self.importer, self.x, self.first = importer, x, first
        self.of_inputs, self.of_state, *self.biases = weights
        count, batch, _ = (int(extent) for extent in x.ty.shape)
        rows, hidden = (int(extent) for extent in self.of_state.ty.shape)
        machine = Microarchitecture.current()
        self.plan = steps.Plan.of(count, batch, hidden, rows // hidden, dtype_of(x), machine)

    def run(self, *, reverse: bool) -> list[relax.Expr]:
        """Return the states of all steps, the last state and, of an LSTM, the last cell."""
        plan, importer = self.plan, self.importer
        lstm = plan.gates == 4
        weights = importer.emit_te(self._packed, self.of_state, primfunc_name_hint="pack_state")
        arguments = [self._projected(), weights, *(self._padded(state) for state in self.first)]
        if not lstm:
            arguments.append(self._new_bias())
        function = (steps.lstm if lstm else steps.gru)(plan, reverse)
        variable = importer.block_builder.add_func(function, "lstm" if lstm else "gru")
        of_states = relax.TensorType([plan.steps, plan.batch, plan.padded], plan.dtype)
        if not lstm:
            states = importer.emit(relax.call_tir(variable, arguments, of_states))
            ends = []
        else:
            of_cell = relax.TensorType([plan.batch, plan.padded], plan.dtype)
            both = importer.emit(relax.call_tir(variable, arguments, [of_states, of_cell]))
            states = importer.emit(relax.TupleGetItem(both, 0))
            ends = [self._cut(importer.emit(relax.TupleGetItem(both, 1)))]
        states = self._cut(states)
        return [states, _at(importer, states, 0 if reverse else plan.steps - 1), *ends]

    def _projected(self) -> relax.Expr:
        """The inputs' part of all gates of all steps, ``[steps, batch, gates, padded]``."""
        plan, importer = self.plan, self.importer
        weights = importer.emit_te(
            self._turned, self.of_inputs, primfunc_name_hint="pack_of_inputs"
        )
        product = importer.emit(relax.op.matmul(self.x, weights))
        if self.biases:
            bias = importer.emit_te(self._bias, *self.biases, primfunc_name_hint="pack_bias")
            product = importer.emit(relax.op.add(product, bias))
        shape = [plan.steps, plan.batch, plan.gates, plan.padded]
        return importer.emit(relax.op.reshape(product, shape))

    def _new_bias(self) -> relax.Expr:
        plan = self.plan
        if not self.biases:
            return self.importer.emit(relax.op.zeros([plan.padded], plan.dtype))

        def of_new(bias: te.Tensor) -> te.Tensor:
            return te.compute((plan.padded,), lambda j: self._unit(bias, 2, j))

        return self.importer.emit_te(of_new, self.biases[1], primfunc_name_hint="pack_new_bias")

    def _padded(self, state: relax.Expr) -> relax.Expr:
        missing = self.plan.padded - self.plan.hidden
        if missing == 0:
            return state
        return self.importer.emit(relax.op.nn.pad(state, [0, 0, 0, missing]))

    def _cut(self, states: relax.Expr) -> relax.Expr:
        if self.plan.padded == self.plan.hidden:
            return states
        axis = len(states.ty.shape) - 1
        cut = relax.op.strided_slice(states, [axis], [0], [self.plan.hidden])
        return self.importer.emit(cut)

    # ---------------------------------------------------------------- packing, of weights alone

    def _unit(self, tensor: te.Tensor, gate: Any, unit: Any, *rest: Any) -> Any:
        """An element of a weight or bias, zero for units that are not there."""
        hidden = self.plan.hidden
        if hidden == self.plan.padded:
            return tensor(gate * hidden + unit, *rest)
        zero = tirx.const(0, self.plan.dtype)
        inside = tensor(gate * hidden + tirx.min(unit, hidden - 1), *rest)
        return tirx.if_then_else(unit < hidden, inside, zero)

    def _turned(self, weights: te.Tensor) -> te.Tensor:
        padded = self.plan.padded
        return te.compute(
            (weights.shape[1], self.plan.gates * padded),
            lambda k, i: self._unit(weights, i // padded, i % padded, k),
            name="turned",
        )

    def _packed(self, weights: te.Tensor) -> te.Tensor:
        return te.compute(
            self.plan.packed_shape,
            lambda t, k, g, i: self._unit(weights, g, t * self.plan.tile + i, k),
            name="packed",
        )

    def _bias(self, of_inputs: te.Tensor, of_state: te.Tensor) -> te.Tensor:
        padded = self.plan.padded

        def element(i: Any) -> Any:
            own = self._unit(of_inputs, i // padded, i % padded)
            other = self._unit(of_state, i // padded, i % padded)
            if self.plan.gates == 3:  # the new gate's bias of the state stands inside a product
                zero = tirx.const(0, self.plan.dtype)
                other = tirx.if_then_else(i // padded == 2, zero, other)
            return own + other

        return te.compute((self.plan.gates * padded,), element, name="bias")
