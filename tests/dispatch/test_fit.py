from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tvmify.artifact import Artifact
from tvmify.artifact.geometry import Geometry
from tvmify.artifact.results import Argument, Computed, StateTensor, View
from tvmify.artifact.structure import structure_text
from tvmify.artifact.writes import Write
from tvmify.cache import Key
from tvmify.dispatch.fit import misfit

ARTIFACT = Artifact(
    library=b"code",
    target='{"kind": "llvm"}',
    inputs=(0, 2),
    weights=("layer.weight",),
    packed=("layer.weight as it is",),
    outputs=(Computed(0), Argument(1), View(Argument(2), Geometry((2,), (1,), 0))),
    output_structure=structure_text(pytree.tree_structure((1, 2, 3))),
    state=("count",),
    writes=(Write(Argument(0), Computed(0)), Write(StateTensor(0), Computed(1))),
)
KEY = Key({"target": '{"kind": "llvm"}'})
PROGRAM: Any = SimpleNamespace(weights=("layer.weight", "layer.bias", "count"))
ARGS = (torch.zeros(2), 7, [torch.zeros(2)])


def test_compiled_artifact_fits() -> None:
    assert misfit(ARTIFACT, KEY, PROGRAM, ARGS, {}) == ""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"target": '{"kind": "llvm", "mattr": ["+avx512f"]}'}, "another target"),
        ({"weights": ("layer.other",)}, "'layer.other'"),
        ({"state": ("__class__.__init__",)}, "__class__"),
        ({"inputs": (1,)}, "leaf 1.*not a tensor"),
        ({"inputs": (3,)}, "leaf 3.*not a tensor"),
        ({"outputs": (Argument(3), Computed(0), Computed(0))}, "leaf 3"),
        ({"outputs": (View(Argument(1), Geometry((), (), 0)),) * 3}, "a view of leaf 1"),
        ({"writes": (Write(Argument(1), Computed(0)),)}, "writes to leaf 1"),
        ({"writes": (Write(Argument(3), Computed(0)),)}, "writes to leaf 3"),
        ({"outputs": ARTIFACT.outputs[:2]}, "3 leaves.* 2"),
        ({"output_structure": "[" * 100_000}, "structure"),
        ({"output_structure": "[1, {}]"}, "structure"),
        ({"output_structure": "null"}, "structure"),
    ],
)
def test_forged_artifact_does_not_fit(changes: dict[str, Any], problem: str) -> None:
    forged = dataclasses.replace(ARTIFACT, **changes)
    assert re.search(problem, misfit(forged, KEY, PROGRAM, ARGS, {}))
