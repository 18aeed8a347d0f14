"""Transforms of ``torch.func`` in ``forward``, which recording leaves as calls around operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram, exported_program
from torch.export.graph_signature import OutputKind

from tvmify.errors import NeedsPython
from tvmify.torch_compat.silence import silenced

#: What a transform that is not compiled needs.
ADVICE = 'Use torch.compile(model, backend="tvmify"), which compiles transforms of torch.func.'

_RECORDED = "torch._functorch.predispatch"
_OF_VMAP = {
    "lazy_load_decompositions",
    "_vmap_increment_nesting",
    "_add_batch_dim",
    "_remove_batch_dim",
    "_vmap_decrement_nesting",
}
_REGION = torch.ops.higher_order.wrap_with_autocast


def refuse_transforms(program: ExportedProgram) -> None:
    """Refuse what `resolve_vmap` cannot resolve, before regions of autocast are inlined.

    Raises
    ------
    NeedsPython
        The program has a transform other than ``torch.vmap``, whose arguments recording loses, or
        ``torch.vmap`` under autocast, whose casts cannot be inserted.
    """
    names = _transforms(program)
    if names - _OF_VMAP:
        raise NeedsPython("forward applies a transform of torch.func other than torch.vmap", ADVICE)
    if names and (
        torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or _REGION in _targets(program)
    ):
        raise NeedsPython("forward applies torch.vmap under autocast", ADVICE)


def resolve_vmap(program: ExportedProgram) -> ExportedProgram:
    """Return a program with operators on whole batches instead of ``torch.vmap``.

    Raises
    ------
    NeedsPython
        It writes to tensors or checks values, which the program on batches would do otherwise.
    """
    if not _transforms(program):
        return program
    with silenced():
        program = exported_program._decompose_exported_program(
            program,
            cia_to_decomp={},
            python_decomp_table={},
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )
    if any(s.kind is not OutputKind.USER_OUTPUT for s in program.graph_signature.output_specs):
        raise NeedsPython("forward applies torch.vmap, and writes to or checks tensors", ADVICE)
    return program


def _transforms(program: ExportedProgram) -> set[str]:
    """Return the names of the functions that begin and end transforms."""
    targets = _targets(program)
    return {t.__name__ for t in targets if getattr(t, "__module__", None) == _RECORDED}


def _targets(program: ExportedProgram) -> Iterator[Any]:
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield from (node.target for node in module.graph.nodes)
