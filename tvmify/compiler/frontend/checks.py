"""Keeps checks of values, which nothing in a program reads.

``torch._assert_async`` and ``torch._check_tensor_all`` raise an error if a tensor is False. They
are computed by ``_functional_assert_async``, inside the compiled program, which either raises or
returns a copy of a result. The call then runs in eager, which raises its own error.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from tvmify.compiler.frontend.sharing import Sharing
from tvmify.errors import UnsupportedOperator

aten = torch.ops.aten

_ASYNC = (aten._assert_async.msg, aten._assert_async.default)
_SCALAR = aten._assert_scalar.default
_COMPARISONS = {
    operator.eq: aten.eq.Scalar,
    operator.ne: aten.ne.Scalar,
    operator.ge: aten.ge.Scalar,
    operator.gt: aten.gt.Scalar,
    operator.le: aten.le.Scalar,
    operator.lt: aten.lt.Scalar,
}


def keep_checks(program: ExportedProgram, shared: Sharing) -> ExportedProgram:
    """Return a program of which a result depends on each check of values.

    Checks of sizes stay as they are: a program is used for the sizes that it was made for.

    Raises
    ------
    UnsupportedOperator
        No result of the program is computed by it.
    """
    if not any(node.target in (*_ASYNC, _SCALAR) for node in program.graph.nodes):
        return program
    program = _copied(program)
    graph = program.graph
    checks = []
    for node in graph.nodes:
        if node.target in _ASYNC:
            checks.append((node, node.args[0]))
        elif node.target is _SCALAR and _is_of_values(node.args[0]):
            with graph.inserting_before(node):
                checks.append((node, _tensor(graph, node.args[0])))
    for node, checked in checks:
        _keep(program, shared, checked, _message(node))
        graph.erase_node(node)
    return program


def _copied(program: ExportedProgram) -> ExportedProgram:
    copied, graph = copy.copy(program), copy.deepcopy(program.graph)
    for node, original in zip(graph.nodes, program.graph.nodes, strict=True):
        node.name = original.name
    copied._graph_module = fx.GraphModule(program.graph_module, graph)
    copied._graph_signature = copy.deepcopy(program.graph_signature)
    return copied


def _message(check: fx.Node) -> str:
    return str(check.args[1]) if len(check.args) > 1 else "Expected a nonzero value, but got zero"


def _is_of_values(condition: Any) -> bool:
    """Whether `_tensor` can compute a condition, on a number that was read from a tensor."""
    if not isinstance(condition, fx.Node):
        return False
    if condition.target is aten.item.default:
        return True
    if condition.target is torch.sym_ite:
        return condition.args[1:] == (1, 0) and _is_of_values(condition.args[0])
    if condition.target not in _COMPARISONS:
        return False
    return _is_of_values(condition.args[0]) and not isinstance(condition.args[1], fx.Node)


def _tensor(graph: fx.Graph, condition: Any) -> fx.Node:
    """Compute with tensors what a program computes with a number that it reads from one."""
    if condition.target is aten.item.default:
        return condition.args[0]
    value = _tensor(graph, condition.args[0])
    if condition.target is torch.sym_ite:
        return _call(graph, aten._to_copy.default, value, dtype=torch.int64)
    return _call(graph, _COMPARISONS[condition.target], value, condition.args[1])


def _call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    values = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
    tensors = [each.meta["val"] for each in node.all_input_nodes]
    with tensors[0].fake_mode:
        node.meta["val"] = target(*values[0], **values[1])
    return node


def _keep(program: ExportedProgram, shared: Sharing, checked: fx.Node, message: str) -> None:
    output = program.graph.output_node()
    specs = program.graph_signature.output_specs
    results = [
        node
        for spec, node in zip(specs, output.args[0], strict=True)  # type: ignore[arg-type]
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    for place, result in zip(shared.places, results, strict=True):
        is_tensor = isinstance(result, fx.Node) and isinstance(result.meta["val"], torch.Tensor)
        if place is None and is_tensor and result.op == "call_function":
            break
    else:
        raise UnsupportedOperator(["aten._assert_async"], "nothing that it computes is returned")
    with program.graph.inserting_before(output):
        kept = _call(program.graph, aten._functional_assert_async.msg, checked, message, result)
    output.replace_input_with(result, kept)
    program.graph_signature.replace_all_uses(result.name, kept.name)
