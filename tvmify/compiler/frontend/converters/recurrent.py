"""LSTM, GRU and plain recurrent layers: stacked and bidirectional layers, and single cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from tvm import relax, te

from tvmify.compiler.frontend.converters.reduction import accumulator
from tvmify.compiler.frontend.converters.registry import converts, refuse_on_gpu
from tvmify.compiler.kernels.recurrent.lower_recurrent import describe
from tvmify.compiler.sizes import is_static

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer

Result = tuple[relax.Expr, ...]


@converts("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def layers(importer: Importer, node: fx.Node) -> Result:
    """All layers of such a module: outputs of all steps, last states and, of an LSTM, cells."""
    is_relu = node.target is torch.ops.aten.rnn_relu.input
    refuse_on_gpu(str(node.target))
    arguments: Any = node.args
    source, initial, weights, _, count, _, _, both, batch_first = arguments
    directions = 2 if both else 1
    per_pass = len(weights) // (count * directions)
    passes = [weights[i : i + per_pass] for i in range(0, len(weights), per_pass)]
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
            output, *end = _steps(importer, x, first, own, reverse=direction == 1, is_relu=is_relu)
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
    _, *end = _steps(importer, x, states, own, reverse=False)
    return tuple(end) if len(end) > 1 else end[0]


def _stacked(importer: Importer, parts: Result) -> relax.Expr:
    planes = [importer.emit(relax.op.expand_dims(part, 0)) for part in parts]
    return planes[0] if len(planes) == 1 else importer.emit(relax.op.concat(planes, 0))


def _at(importer: Importer, states: relax.Expr, index: int) -> relax.Expr:
    part = importer.emit(relax.op.strided_slice(states, [0], [index], [index + 1]))
    return importer.emit(relax.op.squeeze(part, [0]))


def _steps(
    importer: Importer,
    x: relax.Expr,
    first: Sequence[relax.Expr],
    weights: Sequence[relax.Expr],
    *,
    reverse: bool,
    is_relu: bool = False,
) -> list[relax.Expr]:
    """One pass over time: the states of all steps, the last state and, for an LSTM, the last cell.

    Parameters are those of `describe`.
    """
    results = importer.emit(describe(x, first, weights, reverse=reverse, is_relu=is_relu))
    states, *cells = [
        importer.emit(relax.TupleGetItem(results, i)) for i in range(len(results.ty.fields))
    ]
    return [states, _end(importer, states, x.ty.shape[0], reverse=reverse), *cells]


def _end(importer: Importer, states: relax.Expr, steps: Any, *, reverse: bool) -> relax.Expr:
    """Return the state after the last step."""
    if is_static(steps):
        return _at(importer, states, 0 if reverse else int(steps) - 1)

    def last(x: te.Tensor) -> te.Tensor:
        at = 0 if reverse else x.shape[0] - 1
        return te.compute(x.shape[1:], lambda *i: x(at, *i), name="last")

    return importer.emit_te(last, states)
