"""Keys and artifacts that cost nothing to make, each different from the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

from tvmify.artifact import Artifact, Seconds, VerdictKey
from tvmify.artifact.geometry import Geometry
from tvmify.artifact.results import Argument, Computed, Constant, StateTensor, View
from tvmify.artifact.writes import Write
from tvmify.cache import DiskCache, Key
from tvmify.dispatch.programs import Found, Source
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.work import Work
from tvmify.runtime import Executor


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


class Cheap(Work):
    """Work that no call asked for, so whatever the disk has fits."""

    def __init__(self, number: int, disk: DiskCache, build: Callable[[], Artifact]) -> None:
        none = cast(Any, None)
        super().__init__(key_of(number), disk, none, none, none, (), lambda _: None)
        object.__setattr__(self, "_build", build)

    def load(self) -> Found | None:
        assert self.disk is not None
        artifact = self.disk.load(self.key)
        return None if artifact is None else Found(self.key, Executor(artifact), Source.LOADED)

    def build(self, stages: Stages) -> Artifact:
        return self._build()  # type: ignore[attr-defined]
