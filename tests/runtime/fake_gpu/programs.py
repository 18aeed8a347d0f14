"""Runs in a process with two fake GPUs: a saved program built for GPUs."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from tvmify.target import Target

fake: Any = torch.ops.fake_gpu


def main() -> None:
    """Compare its results on both with the expected ones; a difference ends the process."""
    program = torch.load(sys.argv[1], weights_only=True)
    needed = Target.parse(program["target"]).requirements
    module: Any = torch.classes.tvmify.CompiledModule("", program["library"], needed, [])
    assert module.refusal() == "", module.refusal()
    for index in range(2):
        module.bind(module.pack([fake.to_gpu(weight, index) for weight in program["weights"]]))
        results = module.forward([fake.to_gpu(x, index) for x in program["inputs"]])
        for result, want in zip(results, program["expected"], strict=True):
            assert result.device == torch.device("cuda", index)
            got = fake.to_cpu(result)
            assert torch.allclose(got, want, atol=1e-5), (got - want).abs().max()
        assert fake.current_device() == 0
    del module
    gc.collect()
    torch.classes.tvmify.CompiledModule("", program["library"], needed, []).load()
    assert fake.current_device() == 0  # nor does unloading the kernels of both change it
    sys.stdout.write("done\n")


main()
