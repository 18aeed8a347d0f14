"""The calls that a ``torch.export`` program was recorded for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from tvmify.torch_compat.symbols import hint_of, is_symbolic

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def exported_call(program: ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments for a program: zeros for tensors, the recorded values for the rest.

    A size that is a symbol gets the value that it had in the recorded call. The program's own
    example inputs are not used, since files may omit them.
    """
    # Imported here because a process that only runs compiled code does not need it.
    from torch.export.graph_signature import ConstantArgument, InputKind

    recorded = _recorded(program)
    leaves = [
        spec.arg.value
        if isinstance(spec.arg, ConstantArgument)
        else _plain(recorded[spec.arg.name])
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.USER_INPUT
    ]
    spec = program.call_spec.in_spec
    assert spec is not None
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs


def has_symbols(program: ExportedProgram) -> bool:
    """Whether a program serves tensors of different sizes."""
    tensors = (value for value in _recorded(program).values() if isinstance(value, torch.Tensor))
    return is_symbolic(*tensors)


def _recorded(program: ExportedProgram) -> dict[str, Any]:
    return {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = [hint_of(size) for size in value.shape]
        return torch.zeros(sizes, dtype=value.dtype, device=value.device)
    return hint_of(value) if isinstance(value, torch.SymInt) else value
