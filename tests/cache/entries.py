"""Entries to store: nothing in them is ever run."""

from __future__ import annotations

from tvmify.artifact import Artifact
from tvmify.artifact.results import Computed, Constant
from tvmify.cache import Key

KEY = Key({"program": "relu", "target": "llvm"})
OTHER = Key({"program": "gelu", "target": "llvm"})


def artifact(library: bytes = b"code") -> Artifact:
    return Artifact(
        library=library,
        target='{"kind": "llvm"}',
        inputs=(0,),
        weights=("weight",),
        packed=("weight as it is",),
        outputs=(Computed(0), Constant(None)),
        output_structure="[1]",
        report={"kernels": {"relu": "elementwise"}},
    )
