"""A file saved on this machine runs on AArch64, in the emulator of ``make aarch64``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import tvmify

PLACE = Path(__file__).parents[2] / "build" / "aarch64"
EMULATED = PLACE / "environment" / "bin" / "python"
#: The features that machines report; V1's SVE vectors have 256 bits.
N1 = ["dotprod", "fullfp16", "lse", "neon"]
CPUS = {"neoverse-n1": N1, "neoverse-v1": sorted([*N1, "bf16", "i8mm", "sve"])}
SCRIPT = """
import sys, torch, tvmify
file, x, expected = sys.argv[1:]
model = tvmify.load(file, strict=True)
with torch.inference_mode():
    torch.testing.assert_close(model(torch.load(x)), torch.load(expected), rtol=1e-5, atol=1e-6)
print(*model._tvmify.explain(), sep="\\n")
"""


def target_of(cpu: str) -> dict[str, object]:
    mattr = [f"+{feature}" for feature in CPUS[cpu]]
    return {
        "kind": "llvm",
        "mtriple": "aarch64-unknown-linux-gnu",
        "mcpu": "generic",
        "mattr": mattr,
    }


@pytest.mark.skipif(not EMULATED.exists(), reason="make aarch64 sets up an emulator, and did not")
@pytest.mark.parametrize("cpu", CPUS)
def test_file_for_several_processors_uses_the_best_fit(cpu: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 32), nn.Softmax(-1)
    ).eval()
    x = torch.randn(2, 3, 8, 8)
    here = {"kind": "llvm"}
    files = [tmp_path / name for name in ("net.pt", "x.pt", "expected.pt")]
    targets = [here, target_of("neoverse-v1"), target_of("neoverse-n1")]
    tvmify.save(net, files[0], example_inputs=x, targets=targets)
    torch.save(x, files[1])
    with torch.inference_mode():
        torch.save(net(x), files[2])
    done = subprocess.run(
        [EMULATED, "-c", SCRIPT, *files],
        env={**os.environ, "CPU": cpu, "PYTHONPATH": str(PLACE / "tree")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    used = ["not used" not in line for line in done.stdout.splitlines()]
    # V1 could run the last as well.
    assert used == [False, cpu == "neoverse-v1", True], done.stdout
