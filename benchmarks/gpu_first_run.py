"""A first run on an NVIDIA GPU: programs that were built elsewhere, beside eager PyTorch.

    python3 gpu-bundle/run.py [--cases gpt2*] [--seconds 0.5]

`benchmarks.gpu_bundle` packs it as ``run.py``; it needs only Python and PyTorch. Each case runs in
its own process and appends a line to ``results.jsonl`` beside this file; a failed case has the
reason there. The exit code is 1 if a case failed or its results differ from eager's.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.jsonl"
#: Largest difference from eager over the largest value: float16 has three digits.
TOLERANCE = 0.02
#: A case that takes longer counts as hanging.
PATIENCE = 240  # seconds


def main() -> int:
    """Run the cases one after the other; return the exit code."""
    parser = argparse.ArgumentParser(description="Programs built elsewhere, on this GPU.")
    parser.add_argument("--cases", default="*", help="a name or pattern (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="length of a burst (default: 0.5)"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(given.one, given.seconds)))
        return 0
    known = sorted(path.stem for path in (HERE / "models").glob("*.pt"))
    failed = False
    for name in fnmatch.filter(known, given.cases):
        record = {"case": name, **_in_process(name, given.seconds)}
        with RESULTS.open("a", encoding="utf-8") as results:
            results.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)
        failed |= "reason" in record or record["difference"] > TOLERANCE
    return int(failed)


def _in_process(name: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", __file__, "--one", name, "--seconds", str(seconds)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"no result in {PATIENCE} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
        return {"reason": lines[-1], "output": done.stderr[-4000:]}
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, seconds: float) -> dict[str, Any]:
    """Return how one case compares with eager PyTorch: its results, and milliseconds."""
    import torch

    sys.path.insert(0, str(HERE / "site"))
    from gpu_timing import burst
    from torch.export.passes import move_to_device_pass

    import tvmify

    with torch.inference_mode():
        exported = torch.export.load(HERE / "models" / f"{name}.pt2")
        eager = move_to_device_pass(exported, "cuda").module()
        fast = tvmify.load(HERE / "models" / f"{name}.pt", strict=True).cuda()
        fill(fast)
        eager.load_state_dict(fast.state_dict(), strict=False)  # constants are there already
        given, _ = exported.example_inputs or ((), {})
        args = tuple(arg.cuda() for arg in given)
        expected, result = leaves(eager(*args)), leaves(fast(*args))
        difference = max(relative(*pair) for pair in zip(result, expected, strict=True))
        calls = {"eager": lambda: eager(*args), "tvmify": lambda: fast(*args)}
        calls |= {f"{form}, graph": replayed(call, args) for form, call in calls.items()}
        times = {form: burst(call, seconds)["median_ms"] for form, call in calls.items()}
        return {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "difference": difference,
            "milliseconds": times,
        }


def fill(module: Any) -> None:
    """Fill a module with weights of usual magnitude, the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, tensor in sorted(module.state_dict().items()):
        if not tensor.is_floating_point():
            continue  # counters, masks and positions
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            value = noise / max(tensor[0].numel(), 1) ** 0.5
        elif name.endswith(("weight", "running_var")):
            value = 1 + 0.1 * noise.clamp(-3, 3)
        else:
            value = 0.1 * noise
        tensor.copy_(value)


def leaves(result: Any) -> list[Any]:
    """Return the tensors of a result."""
    return [result] if not isinstance(result, (tuple, list)) else list(result)


def relative(result: Any, expected: Any) -> float:
    """Return the largest difference over the largest value."""
    expected = expected.double()
    largest = expected.abs().amax().clamp(min=1e-6)
    return float(((result.double() - expected).abs().amax() / largest).nan_to_num(nan=1e9))


def replayed(call: Callable[[], Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    """Return the call as a replayed CUDA graph, with inputs copied in."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph, given = torch.cuda.CUDAGraph(), [arg.clone() for arg in args]
    with torch.cuda.graph(graph):
        call()

    def again() -> None:
        torch._foreach_copy_(list(args), given)
        graph.replay()

    return again


if __name__ == "__main__":
    sys.exit(main())
