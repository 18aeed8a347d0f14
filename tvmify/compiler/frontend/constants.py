"""Evaluates the parts of a program that depend on neither inputs nor weights, with torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

#: Larger results are computed at run time, which is faster than loading them from the library.
LARGEST_CONSTANT = 1 << 20  # bytes


def fold_constants(program: ExportedProgram) -> None:
    """Replace constant subexpressions by tensor constants of the graph, in place. Causal masks,
    position ids and similar tensors, which transformers rebuild in every call, become constants;
    converters can then see, for example, that a mask is all true. Weights are arguments, never
    constants, and so are values computed from them.
    """
    graph = program.graph
    known: dict[fx.Node, Any] = {}
    names = {
        spec.arg.name: str(spec.target)
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR
    }
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in names:
            known[node] = _resolved(program.constants[names[node.name]])
        elif (
            is_pure(node)
            and all(argument in known for argument in node.all_input_nodes)
            and _bytes(node) <= LARGEST_CONSTANT
        ):
            known[node] = _evaluate(node, known)
    for node, value in known.items():
        is_used = any(user not in known for user in node.users)
        if node.op == "call_function" and is_used and isinstance(value, torch.Tensor):
            _replace(program, node, value)
    graph.eliminate_dead_code()


def constant_of(program: ExportedProgram, node: Any) -> torch.Tensor | None:
    """Return the value of a node that holds a tensor constant, or None."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "get_attr":
        return getattr(program.graph_module, str(node.target))
    if node.op != "placeholder":
        return None
    for spec in program.graph_signature.input_specs:
        if spec.arg.name == node.name and spec.kind is InputKind.CONSTANT_TENSOR:
            return program.constants[str(spec.target)]
    return None


def is_pure(node: fx.Node) -> bool:
    """Whether a node is a pure function of its arguments."""
    tags = getattr(node.target, "tags", ())
    return (
        node.op == "call_function"
        and torch.Tag.nondeterministic_seeded not in tags
        and not node.is_impure()
    )


def _evaluate(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    arguments, keywords = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    with torch.no_grad():
        result = node.target(*arguments, **keywords)  # type: ignore[operator]
    return pytree.tree_map_only(torch.Tensor, _resolved, result)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Compute a conjugate or negative view: a decomposed program does not resolve it."""
    return tensor.resolve_conj().resolve_neg()


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _replace(program: ExportedProgram, node: fx.Node, value: torch.Tensor) -> None:
    module = program.graph_module
    name = f"folded_{node.name}"
    module.register_buffer(name, value.detach().clone(), persistent=False)
    with program.graph.inserting_before(node):
        constant = program.graph.get_attr(name)
    constant.meta = dict(node.meta)
    node.replace_all_uses_with(constant)
