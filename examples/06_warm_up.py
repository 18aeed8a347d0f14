"""Compile ahead of time for recorded calls of a service, so that the service never compiles.

It shows a service that records its signatures (`record=`) and runs in eager PyTorch meanwhile;
`tvmify.warm_cache`, which compiles them, as `tvmify warmup resnet:seeded_resnet18 --from FILE`
does; and the same service afterwards, where a missing program would be an error.

    python examples/06_warm_up.py
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import tvmify
from resnet import seeded_resnet18


@torch.inference_mode()
def serve(on_miss: str, sides: list[int], record: str | None) -> None:
    """Answer a few requests, and print how many programs were compiled or loaded for them."""
    network = tvmify.tvmify(seeded_resnet18(), on_miss=on_miss, record=record, compare=False)
    for side in sides:
        network(torch.rand(1, 3, side, side))
    done = network.cache_info()
    print(f"{len(sides)} signature(s): {done.builds} compiled, {done.disk_hits} loaded from disk")


def main() -> None:
    """Run the service in a process, warm up here, and run the service again."""
    parser = argparse.ArgumentParser(description="Compile ahead of time.")
    parser.add_argument("--sides", type=int, nargs="+", default=[160, 192, 224], metavar="PIXELS")
    parser.add_argument("--serve", metavar="ON_MISS", help=argparse.SUPPRESS)
    parser.add_argument("--record", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.sides, given.record)
        return
    service = [sys.executable, __file__, "--sides", *map(str, given.sides), "--serve"]
    with tempfile.TemporaryDirectory() as folder:
        signatures = Path(folder, "signatures.jsonl")
        first = [*service, "eager", "--record", str(signatures)]
        print("A service that may not compile:", flush=True)
        # Running in eager is a warning, but here it is intended.
        subprocess.run(first, check=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
        os.chdir(Path(__file__).parent)  # from where `resnet` can be imported
        warmed = tvmify.warm_cache("resnet:seeded_resnet18", file=signatures)
    for outcome in warmed.outcomes:
        print(f"  {outcome.source} in {outcome.seconds:.1f} s: {outcome.signature}")
    print("The same service, where a missing program is an error:", flush=True)
    subprocess.run([*service, "error"], check=True)


if __name__ == "__main__":
    main()
