"""Replaces operators by their decompositions, one at a time.

`ExportedProgram.run_decompositions` records the whole program again, which takes as long as
`torch.export` did. Here an operator is recorded by itself, once for all calls with arguments of the
same types: the layers of a model repeat a dozen of them. The result is the same program.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _special_op_to_preserve_cia
from torch._functorch._aot_autograd.functional_utils import (
    from_fun,
    has_data_mutation,
    to_fun,
)
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.export import ExportedProgram
from torch.export.exported_program import _override_composite_implicit_decomp
from torch.export.graph_signature import ArgumentSpec, ConstantArgument
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from tvmify.compiler.aten import operators
from tvmify.torch_compat.symbols import SYMBOLS, identities_of, identity_of
from tvmify.torch_compat.tracing import fake_modes

aten = torch.ops.aten

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

#: Decompositions: functions with the arguments of their operators.
Rules: TypeAlias = Mapping[OperatorBase, Callable[..., Any]]


def expand(program: ExportedProgram, composite: Rules, others: Rules) -> ExportedProgram | None:
    """Return a program of operators that have no rules.

    Parameters
    ----------
    composite
        Rules for operators that PyTorch composes of others (``CompositeImplicitAutograd``). Such an
        operator without a rule is decomposed as in eager.
    others
        Rules for all other operators.

    Returns
    -------
    None if only a recording of the whole program will do: it writes to tensors, calls graphs, or
    has sizes that depend on values.
    """
    modes = fake_modes(program.graph)
    if len(modes) != 1 or not all(map(_stands_alone, program.graph.nodes)):
        return None
    expander = _Expander(composite, others)
    with modes.pop(), _override_composite_implicit_decomp(dict(composite)):
        for node in program.graph.nodes:
            if not expander.add(node):
                return None
    expander.graph.eliminate_dead_code()
    expanded = copy.copy(program)
    expanded._graph_module = fx.GraphModule(program.graph_module, expander.graph)
    signature, results = program.graph_signature, expander.graph.output_node().args[0]
    expanded._graph_signature = dataclasses.replace(
        signature,
        output_specs=[
            dataclasses.replace(spec, arg=_argument(result, spec.arg))
            for spec, result in zip(signature.output_specs, results, strict=True)  # type: ignore[arg-type]
        ],
    )
    return expanded


def _argument(result: Any, before: ArgumentSpec) -> ArgumentSpec:
    """Describe a result in the signature of the program."""
    if isinstance(result, fx.Node):
        return dataclasses.replace(before, name=result.name)
    return ConstantArgument(name="", value=result)


def _stands_alone(node: fx.Node) -> bool:
    """Whether a node computes its results from those of others, and does nothing else."""
    if node.target is operators.REPLAYED:
        return True
    if node.op == "get_attr" or isinstance(node.target, HigherOrderOperator):
        return False
    if "unbacked_bindings" in node.meta:
        return False
    if node.target is aten.detach_.default:  # of each literal: it changes no values
        return True
    return not operators.is_mutating(node)


class _Expander:
    """Copies the nodes of a graph, and replaces operators on the way.

    Attributes
    ----------
    graph
        The copy.
    """

    def __init__(self, composite: Rules, others: Rules) -> None:
        self.graph = fx.Graph()
        self._others = others
        self._kept = {op for op, rule in composite.items() if rule is _special_op_to_preserve_cia}
        self._recorded: dict[Hashable, fx.Graph | None] = {}
        #: What became of each node: one or, if it has several results, some nodes and None.
        self._became: dict[fx.Node, Any] = {}
        #: A node for each symbolic size.
        self._sizes: dict[Any, fx.Node] = {}

    def add(self, node: fx.Node) -> bool:
        """Copy or replace a node; False if this is not possible."""
        several = self._new(node.args[0]) if node.target is operator.getitem else None
        if isinstance(several, (tuple, list)):
            self._became[node] = several[node.args[1]]
        elif node.target is aten.detach_.default:
            self._became[node] = self._new(node.args[0])
        elif self._has_rule(node.target):
            return self._replace(node)
        else:
            self._became[node] = copied = self._copied(node, self._new)
            if node.op == "placeholder":  # the signature refers to it, even to one named "input"
                copied.name = node.name
        return True

    def _new(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, self._became.__getitem__)

    def _copied(self, node: fx.Node, new: Callable[[fx.Node], Any]) -> fx.Node:
        """Copy a node, but read each symbolic size once only."""
        if node.target is not aten.sym_size.int:
            return self.graph.node_copy(node, new)
        size = identity_of(node.meta["val"])
        if size not in self._sizes:
            self._sizes[size] = self.graph.node_copy(node, new)
        return self._sizes[size]

    def _has_rule(self, target: Any) -> bool:
        if not isinstance(target, OpOverload) or target in self._kept:
            return False
        return target in self._others or target.has_kernel_for_dispatch_key(_COMPOSITE)

    def _replace(self, node: fx.Node) -> bool:
        # Nodes, each once: an operator may ask whether two arguments are one tensor.
        nodes = node.all_input_nodes
        key = node.target, _described(node.args, nodes), _described(node.kwargs, nodes)
        if key not in self._recorded:
            self._recorded[key] = self._record(node, nodes)
        graph = self._recorded[key]
        if graph is None:
            return False
        inside: dict[fx.Node, Any] = {}
        inputs = iter(nodes)
        for each in graph.nodes:
            if each.op == "placeholder":
                inside[each] = self._became[next(inputs)]
            elif each.op == "output":
                self._became[node] = fx.map_arg(each.args[0], inside.__getitem__)
            elif each.op == "get_attr":  # a constant
                return False
            else:
                inside[each] = self._copied(each, inside.__getitem__)
        return True

    def _record(self, node: fx.Node, nodes: Sequence[fx.Node]) -> fx.Graph | None:
        """Record the decomposition of an operator; the placeholders are `nodes`.

        The result is None if it writes to an argument. Schemas do not tell: that of `batch_norm`
        says nothing of the statistics.
        """
        writes = False

        def call(*inputs: Any) -> Any:
            nonlocal writes
            wrapped = pytree.tree_map_only(torch.Tensor, to_fun, inputs)
            functional = dict(zip(nodes, wrapped, strict=True))
            args, kwargs = fx.map_arg((node.args, node.kwargs), functional.__getitem__)
            results = node.target(*args, **kwargs)
            tensors = (each for each in wrapped if isinstance(each, torch.Tensor))
            writes = any(map(has_data_mutation, tensors))
            return pytree.tree_map_only(torch.Tensor, from_fun, results)

        values = [each.meta["val"] for each in nodes]
        with FunctionalTensorMode(export=True), enable_python_dispatcher(), torch.no_grad():
            graph = make_fx(call, decomposition_table=dict(self._others))(*values).graph
        return None if writes else graph


def _described(arguments: Any, nodes: Sequence[fx.Node]) -> str:
    """Describe what a recording depends on: constants, and which nodes are passed, of what type.

    A text tells apart 1, 1.0 and True, and 0.0 and -0.0.
    """
    return repr(fx.map_arg(arguments, lambda node: (nodes.index(node), _type(node.meta["val"]))))


def _type(value: Any) -> Any:
    if isinstance(value, SYMBOLS):
        return value.node.expr
    if not isinstance(value, torch.Tensor):
        return value
    places = *value.shape, *value.stride(), value.storage_offset()
    return value.dtype, value.device, identities_of(places)
