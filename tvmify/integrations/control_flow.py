"""Graphs of ``torch.compile`` with what only Python can run: ``torch.cond``, ``torch.while_loop``,
and ``x.data = y``, which gives a tensor other memory; in training, recurrent layers, too.

Such a graph is cut before and after each of these. The pieces between are compiled, and so are
branches, conditions and bodies; Python decides which of them run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from tvmify.integrations.calls import GraphCalls
from tvmify.integrations.dynamo_graph import DynamoGraph, Origin, example_of
from tvmify.options import CompileOptions


def calls_of(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    origin: Origin,
    options: CompileOptions,
    *,
    weights_are_state: bool,
) -> Callable[..., Any]:
    """Return a function that runs the calls of a graph: by one program, or by several with Python
    between.

    Parameters
    ----------
    module, inputs, origin, weights_are_state
        As for `DynamoGraph.of`.
    options
        The options of the backend.
    """

    def calls(module: fx.GraphModule, inputs: Sequence[Any], origin: Origin) -> Callable[..., Any]:
        return calls_of(module, inputs, origin, options, weights_are_state=weights_are_state)

    if any(map(_needs_python, module.graph.nodes)):
        return in_pieces(module, inputs, origin, calls)
    graph = DynamoGraph.of(module, inputs, origin, weights_are_state=weights_are_state)
    return GraphCalls(graph, options)


#: Returns a function that runs the calls of a piece.
_Calls = Callable[[fx.GraphModule, Sequence[Any], Origin], Callable[..., Any]]


def in_pieces(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    origin: Origin,
    calls: _Calls,
    needs_python: Callable[[fx.Node], bool] | None = None,
) -> fx.GraphModule:
    """Cut a graph around what needs Python, and compile the pieces.

    Parameters
    ----------
    module, inputs, origin
        As for `DynamoGraph.of`.
    calls
        Compiles a piece.
    needs_python
        Whether Python has to run a node; by default, what always needs it does.
    """
    needs_python = needs_python or _needs_python
    numbers: dict[fx.Node, int] = {}
    number = 0
    for node in module.graph.nodes:
        if node.target is operator.getitem and needs_python(node.args[0]):
            numbers[node] = numbers[node.args[0]]  # pieces pass tensors to each other, not tuples
            continue
        number += needs_python(node)
        numbers[node] = number
        number += needs_python(node)
    whole = split_module(module, module, numbers.__getitem__, keep_original_order=True)
    places = module.graph.find_nodes(op="placeholder")
    given = {node.name: value for node, value in zip(places, inputs, strict=True)}
    for name, piece in list(whole.named_children()):
        assert isinstance(piece, fx.GraphModule)
        if any(map(needs_python, piece.graph.nodes)):
            _run_in_python(piece, origin, calls)
        else:
            part = origin.part(f"piece {name.removeprefix('submod_')}")
            setattr(whole, name, _compiled(piece, given, part, calls))
    return whole


class _Compiled(torch.nn.Module):
    """The calls of a piece, as a part of a graph module.

    Parameters
    ----------
    calls
        Returns a tuple or list.
    is_one
        Whether the result is its only element.
    """

    def __init__(self, calls: Callable[..., Any], *, is_one: bool) -> None:
        super().__init__()
        self._calls, self._is_one = calls, is_one

    def forward(self, *args: Any) -> Any:
        """Run one call."""
        results = self._calls(*args)
        return results[0] if self._is_one else results


def _compiled(
    piece: fx.GraphModule, given: dict[str, Any], origin: Origin, calls: _Calls
) -> torch.nn.Module:
    """Return a piece that runs compiled.

    Parameters
    ----------
    given
        Examples of some of its arguments, by name. For the others, the graph has examples; if it
        lacks one, the piece runs in eager.
    """
    places = piece.graph.find_nodes(op="placeholder")
    inputs = [example_of(node, given.get(str(node.target))) for node in places]
    if any(value is None for value in inputs):
        return piece
    inputs = [given.get(str(p.target), _leaf(x)) for p, x in zip(places, inputs, strict=True)]
    output = piece.graph.output_node()
    is_one = isinstance(output.args[0], fx.Node)
    if is_one:
        output.args = (output.args,)
        piece.recompile()
    return _Compiled(calls(piece, inputs, origin), is_one=is_one)


def _leaf(value: Any) -> Any:
    """Return an example of an argument that autograd does not take for a result."""
    if isinstance(value, torch.Tensor) and not value.is_leaf:
        return value.detach().requires_grad_()
    return value


# ------------------------------------------------------------------------------ what needs Python


def _cond(predicate: Any, if_true: Any, if_false: Any, operands: Sequence[Any]) -> Any:
    return (if_true if predicate else if_false)(*operands)


def _while_loop(
    condition: Any, body: Any, carried: Sequence[Any], additional: Sequence[Any] = ()
) -> Any:
    # copies, since results must not be arguments, even if the body never runs
    values = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in carried)
    while condition(*values, *additional):
        values = tuple(body(*values, *additional))
    return values


_CONTROL_FLOW = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.while_loop: _while_loop,
}
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
#: What Dynamo turns ``x.data = y`` into.
_ASSIGNMENT = ("set_", "_lower_version_count_by_1", "shallow_copy_data_")


def _is_control_flow(node: fx.Node) -> bool:
    return node.target in _CONTROL_FLOW and not node.kwargs and len(node.args) <= 4


def assigns_data(node: fx.Node) -> bool:
    """Whether a node is a part of ``x.data = y``."""
    return getattr(node.target, "__name__", "") in _ASSIGNMENT


def _needs_python(node: fx.Node) -> bool:
    return _is_control_flow(node) or assigns_data(node)


def is_not_for_autograd(node: fx.Node) -> bool:
    """Whether AOTAutograd shall not see a node: a part of ``x.data = y``, or a recurrent layer.

    It would write all steps of a sequence one after the other, without dropout between layers.
    """
    return assigns_data(node) or node.target in _RECURRENT


def _run_in_python(piece: fx.GraphModule, origin: Origin, calls: _Calls) -> None:
    """Let Python run a piece, and compile what its control flow calls."""
    for node in filter(_is_control_flow, piece.graph.nodes):
        node.target = _CONTROL_FLOW[node.target]  # type: ignore[index]
    for node in piece.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if isinstance(part := getattr(piece, name), fx.GraphModule):
            setattr(piece, name, _compiled(part, {}, origin.part(name), calls))
    piece.recompile()
