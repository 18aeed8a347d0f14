"""Whether a program from a cache fits a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmify.artifact import Artifact
from tvmify.artifact.results import View
from tvmify.artifact.structure import structure_of
from tvmify.cache import Key
from tvmify.capture import Program
from tvmify.errors import NotCompiled
from tvmify.signature import Args, Kwargs, NumberArgument


def misfit(
    artifact: Artifact,
    key: Key,
    program: Program,
    args: Args,
    kwargs: Kwargs,
) -> str:
    """Return why an artifact does not fit a call; empty if it does.

    An artifact from the compiler always fits, since its key covers everything that is checked here.
    A forged one, by someone who can write to the cache, is refused before any of it runs.
    """
    if artifact.target != key.entries["target"]:
        return "it is for another target than its key"
    foreign = {*artifact.weights, *artifact.state} - set(program.weights)
    if foreign:
        return f"it reads {min(foreign)!r:.100}, which the program does not"
    leaves = pytree.tree_leaves((args, kwargs))
    for index in artifact.inputs:
        if not _is_tensor(leaves, index):
            return f"it reads leaf {index} of the arguments, which is not a tensor"
    for result in artifact.outputs:
        index = result.argument
        if index is not None and index >= len(leaves):
            return f"it returns leaf {index} of the arguments, which the call lacks"
        if index is not None and isinstance(result, View) and not _is_tensor(leaves, index):
            return f"it returns a view of leaf {index} of the arguments, which is not a tensor"
    for write in artifact.writes:
        index = write.target.argument
        if index is not None and not _is_tensor(leaves, index):
            return f"it writes to leaf {index} of the arguments, which is not a tensor"
    return _misfit_of_structure(artifact)


def _is_tensor(leaves: Sequence[Any], index: int) -> bool:
    # A number that may have any value is passed as a tensor.
    return index < len(leaves) and isinstance(leaves[index], (torch.Tensor, NumberArgument))


def _misfit_of_structure(artifact: Artifact) -> str:
    try:
        structure = structure_of(artifact.output_structure)
    except NotCompiled:
        return ""  # a class is not imported yet: that is for the dispatcher to say
    except Exception as error:  # of any kind: the text is untrusted
        return f"the structure of its result cannot be read: {error!r:.100}"
    if structure.num_leaves != len(artifact.outputs):
        return f"its result has {structure.num_leaves} leaves, but it has {len(artifact.outputs)}"
    return ""
