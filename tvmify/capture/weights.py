"""The weights of recorded programs: tensors of the module, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from tvmify.capture.state import tensor_names
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.memory import has_memory

#: Equal for two Python objects of one tensor.
_Identity: TypeAlias = tuple[Any, ...]


def names_of(callable_: Callable[..., Any]) -> dict[_Identity, str]:
    """Return the first dotted name of each tensor of a module; none for a function."""
    names: dict[_Identity, str] = {}
    if isinstance(callable_, torch.nn.Module):
        for name, tensor in tensor_names(callable_):
            names.setdefault(_identity(tensor), name)
    return names


def _identity(tensor: torch.Tensor) -> _Identity:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_nested
    if not (is_plain and tensor.layout is torch.strided and tensor.numel() and has_memory(tensor)):
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def with_weights(program: ExportedProgram, weights: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Return a program of the same graph with these tensors as its state dict.

    A recording that is kept has none, nor the arguments it was recorded with: it would keep them
    alive.
    """
    program = copy.copy(program)
    program._state_dict = dict(weights)
    program._example_inputs = None
    return program


def name_attributes(program: ExportedProgram, names: dict[_Identity, str]) -> list[torch.Tensor]:
    """Make every tensor that belongs to the module a persistent buffer of the program, in place.

    ``torch.export`` keeps tensor attributes and non-persistent buffers with the literals. It keeps
    weights there, too, once for each use, if forward finds their modules in a list or a closure.

    Parameters
    ----------
    names
        What `names_of` returns for the module.

    Returns
    -------
    list of torch.Tensor
        The literals that come from closures and globals, not from code.
    """
    outside: list[torch.Tensor] = []
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    specs, kept = program.graph_signature.input_specs, list[InputSpec]()
    named = {
        spec.target: placeholders[spec.arg.name]
        for spec in specs
        if spec.target is not None and spec.target not in program.constants
    }
    for spec in specs:
        if spec.target is None or spec.target not in program.constants:
            kept.append(spec)
            continue
        tensor = program.constants[spec.target]
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedOperator(
                [str(type(tensor).__name__)], "the program uses an object of a custom class"
            )
        is_buffer = spec.kind == InputKind.BUFFER
        name = spec.target if is_buffer else names.get(_identity(tensor))
        node = placeholders[spec.arg.name]
        if name is None:
            kept.append(spec)
            if not _is_fresh_literal(node):
                outside.append(tensor)
            continue
        del program.constants[spec.target]
        if name in named:
            node.replace_all_uses_with(named[name])
            program.graph.erase_node(node)
            continue
        named[name] = node
        program.state_dict[name] = tensor
        kept.append(InputSpec(InputKind.BUFFER, spec.arg, name, persistent=True))
    specs[:] = kept
    program.graph_module.recompile()
    return outside


def _is_fresh_literal(node: torch.fx.Node) -> bool:
    """Whether a constant is a ``torch.tensor([...])`` in forward, which is always copied first."""
    copies = torch.ops.aten.lift_fresh_copy.default
    return bool(node.users) and all(user.target is copies for user in node.users)
