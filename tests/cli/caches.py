"""A cache directory with small fake entries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from tvmify.artifact import Artifact, Seconds, VerdictKey
from tvmify.artifact.results import Computed
from tvmify.cache import DiskCache, Key
from tvmify.cli import app

ENTRIES = {
    "program": "argument %0 x: Tensor\n%1: Tensor = aten::relu(%0)\nreturn %1",
    "inputs": "0: float32[1, 3] cpu\nTreeSpec(tuple, None, [*])",
    "weights": "",
    "unpacked": "",
    "target": '{"kind": "llvm", "mattr": ["+avx2", "+fma"], "mcpu": "x86-64"}',
    "options": "accuracy='default'\ntune=None",
    "modes": "default dtype: torch.float32",
    "tuned for": "",
    "tvmify": "version: 0.1.0\nformat: 5\nsources: 0123",
    "torch": "2.13.0",
    "tvm": "0.27.0",
    "tvm-ffi": "0.1.14",
}
REPORT = {
    "kernels": {"fused_relu": "elementwise"},
    "unscheduled": 0,
    "seconds": {"build": 0.5},
    "operators": {"aten.relu.default": 1},
}


def add(directory: Path, age: float = 0.0, library: bytes = b"code", **entries: Any) -> Key:
    """Store an entry, built and last used `age` seconds before the year 2020."""
    report, shapes = entries.pop("report", REPORT), entries.pop("shapes", None)
    key = Key(ENTRIES | entries)
    artifact = Artifact(
        library=library,
        target=key.entries["target"],
        inputs=(0,),
        weights=(),
        packed=(),
        outputs=(Computed(0),),
        output_structure="[1, null]",
        shapes=shapes,
        verdicts={VerdictKey(2): Seconds(0.001, 0.002)},
        report=report,
    )
    cache = DiskCache(directory)
    cache.store(key, artifact)
    time = 1_577_836_800 - age
    for file in (directory / key.digest).iterdir():
        os.utime(file, (time, time))
    return key


def run(*arguments: object, **given: Any) -> Result:
    """Run a command without a terminal."""
    return CliRunner().invoke(app, list(map(str, arguments)), **given)
