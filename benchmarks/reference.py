"""Files that the contenders share for one model: float64 outputs, and an ONNX file.

    python -m benchmarks.reference MODEL FOLDER [--onnx]

Runs in its own process, so that its memory does not count as a contender's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import warnings
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from benchmarks.contenders import first_line
from benchmarks.models import build

OUTPUTS = "outputs.pt"
ONNX = "model.onnx"
EXPORT = "export.json"


def make(name: str, folder: Path, onnx: bool) -> None:
    """Write the files of one model; if the ONNX export fails, the reason instead."""
    module, args = build(name)
    if onnx:
        start = time.perf_counter()
        reason = ""
        try:
            logging.disable(logging.WARNING)
            with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
                warnings.simplefilter("ignore")
                torch.onnx.export(module, args, str(folder / ONNX), dynamo=True, verbose=False)
        except Exception as error:  # a missing package, an operator that the exporter lacks
            reason = first_line(error)
            (folder / ONNX).unlink(missing_ok=True)
        record = {"seconds": time.perf_counter() - start, "reason": reason}
        (folder / EXPORT).write_text(json.dumps(record), encoding="utf-8")
    module = module.double()
    wide = [arg.double() if arg.is_floating_point() else arg for arg in args]
    with torch.inference_mode():
        outputs = pytree.tree_leaves(module(*wide))
    if not all(bool(output.isfinite().all()) for output in outputs):
        raise ValueError(f"{name} is no sound model: its outputs are not finite")
    torch.save(outputs, folder / OUTPUTS)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), "--onnx" in sys.argv)
