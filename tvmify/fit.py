"""Whether a program from a cache fits the call that it is to serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmify.artifact import Artifact
from tvmify.cache import Key
from tvmify.capture import Program
from tvmify.errors import NotCompiled
from tvmify.signature import NumberArgument
from tvmify.structure import structure_of


def misfit(
    artifact: Artifact,
    key: Key,
    program: Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str:
    """Return what an artifact asks for that the call does not have; empty if there is nothing.

    An artifact that the compiler made always fits: its key has all that is looked at here. Who can
    write to the cache can make up another, and shall find it refused before any of it runs.
    """
    if artifact.target != key.entries["target"]:
        return "it is for another target than its key"
    foreign = {*artifact.weights, *artifact.state} - set(program.weights)
    if foreign:
        return f"it reads {min(foreign)!r:.100}, which the program does not"
    leaves = pytree.tree_leaves((args, kwargs))
    for index in artifact.inputs:
        if not _is_tensor(leaves, index):
            return f"it reads leaf {index} of the arguments, which is no tensor"
    for kind, index, is_tensor in _arguments(artifact):
        if index >= len(leaves) or (is_tensor and not _is_tensor(leaves, index)):
            return f"{kind} leaf {index} of the arguments, which has not what it takes"
    return _misfit_of_structure(artifact)


def _arguments(artifact: Artifact) -> list[tuple[str, int, bool]]:
    """List the leaves that results are, and that are written to; and if they must be tensors."""
    found = []
    for kind, value in artifact.outputs:
        if kind == "argument":
            found.append(("it returns", value, False))
        elif kind == "view" and value[0] == "argument":
            found.append(("it returns a view of", value[1], True))
    writes = [("it writes to", index, True) for kind, index, _ in artifact.writes if kind[0] == "a"]
    return found + writes


def _is_tensor(leaves: Sequence[Any], index: int) -> bool:
    # A number of any value reaches the program as a tensor.
    return index < len(leaves) and isinstance(leaves[index], (torch.Tensor, NumberArgument))


def _misfit_of_structure(artifact: Artifact) -> str:
    try:
        structure = structure_of(artifact.output_structure)
    except NotCompiled:
        return ""  # a class is not imported yet: that is for the dispatcher to say
    except Exception as error:  # of any kind: the text may say anything to PyTorch's reader of it
        return f"the structure of its result is none: {error!r:.100}"
    if structure.num_leaves != len(artifact.outputs):
        return (
            f"its result has {structure.num_leaves} leaves, of which it has {len(artifact.outputs)}"
        )
    return ""
