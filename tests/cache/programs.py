"""Keys and artifacts that cost nothing to make, each different from the others."""

from __future__ import annotations

import random

from tvmify.artifact import Artifact, Seconds, VerdictKey
from tvmify.artifact.geometry import Geometry
from tvmify.artifact.results import Argument, Computed, Constant, StateTensor, View
from tvmify.artifact.writes import Write
from tvmify.cache import Key


def key_of(number: int) -> Key:
    """Return the key of a program that has no other property than its number."""
    return Key({"program": f"program {number}", "inputs": "float32[2, 3]", "target": "llvm"})


def artifact_of(number: int) -> Artifact:
    """Return what would be compiled of it; the same in every process."""
    chance = random.Random(number)
    return Artifact(
        library=chance.randbytes(chance.randrange(1, 200_000)),
        target='{"kind": "llvm"}',
        inputs=(0, 2),
        weights=("weight", "layers.0.bias"),
        packed=("weight as it is", "bias reversed"),
        outputs=(Computed(0), View(Argument(0), Geometry((2, 3), (3, 1), 0)), Constant(None)),
        output_structure="[1]",
        state=("counter",),
        writes=(Write(StateTensor(0), Computed(1)),),
        verdicts={VerdictKey(2): Seconds(1e-3, 2e-3)},
        report={"number": number, "kernels": {"relu": "elementwise"}},
    )
