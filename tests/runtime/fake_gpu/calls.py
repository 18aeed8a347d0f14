"""Runs in a process with two fake GPUs: a program built for the CPU, on their memory.

Its kernels compute on the host, whose memory the fake GPUs share; the rest is as for GPUs.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch import nn

from tvmify.compiler import compile
from tvmify.dispatch import keys
from tvmify.runtime import cpu_features
from tvmify.target import Target, target_for

fake: Any = torch.ops.fake_gpu


class Net(nn.Module):
    """Results that TVM computes, that PyTorch computes, and views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(self.linear(x)) + torch.arange(6.0)
        ordered = torch.sort(y, stable=True)[0]
        return y, ordered, (y * 2).view(-1), torch.sort(-y)[0].view(-1)


def exported_constant() -> torch.export.ExportedProgram:
    """Return a program without any tensor."""

    class Constant(nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.arange(6.0) * 2

    return torch.export.export(Constant(), ())


def compiled(artifact: Any, architecture: str) -> Any:
    """Return the native object of an artifact, as if it were for GPUs of an architecture."""
    library = torch.frombuffer(bytearray(artifact.library), dtype=torch.uint8)
    needed = Target.parse(artifact.target).requirements
    features = [name for name in needed if "cuda:" not in name] + [f"cuda:{architecture}"]
    return torch.classes.tvmify.CompiledModule("", library, features, [])


def refused(run: Any, *arguments: Any) -> str:
    """Return why a call is refused."""
    try:
        run(*arguments)
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Run all of it; an assertion that fails ends the process."""
    net, x = Net().eval(), torch.randn(5, 8)
    with torch.no_grad():
        exported = torch.export.export(net, (x,))
        expected = net(x)
    target = target_for(None, "cpu", cpu_features())
    artifact = compile(exported, target)
    weights = [dict(net.named_parameters())[name].detach() for name in artifact.weights]

    assert not compiled(artifact, "sm_75").refusal()  # the driver compiles its PTX
    for architecture in ("sm_90a", "sm_86", "nonsense"):
        refusal = compiled(artifact, architecture).refusal()
        assert f"({architecture}), and cuda:0 is sm_80, cuda:1 is sm_80" in refusal, refusal
    assert "driver: 13.2" in keys._cuda_text(torch.device("cuda", 0))
    module = compiled(artifact, "sm_80")
    assert module.refusal() == ""

    for index, stream in ((0, 0), (1, 5), (1, 0), (0, 7)):
        fake.use_stream(index, stream)
        waits = fake.synchronizations()
        module.bind(module.pack([fake.to_gpu(weight, index) for weight in weights]))
        assert fake.synchronizations() > waits
        given = fake.to_gpu(x, index)
        results = module.forward([given])
        blocks, waits = fake.blocks(), fake.synchronizations()
        results = module.forward([given])
        assert fake.synchronizations() == waits  # a call does not wait
        assert fake.blocks() == blocks
        assert fake.current_device() == 0
        for result, want in zip(results, expected, strict=True):
            assert result.device == torch.device("cuda", index)
            assert torch.allclose(fake.to_cpu(result), want, atol=1e-5)
            assert fake.is_pytorchs(result) and fake.stream_of(result) == stream

    gpu = fake.to_gpu(x, 0)
    assert "TypeError" in refused(module.forward, [x])
    assert "tensors on cuda:1 and weights on cuda:0" in refused(module.forward, [fake.to_gpu(x, 1)])
    saved = torch.classes.tvmify.SavedModule(torch.ops.tvmify.describe(())[0], [])
    arguments, _ = torch.ops.tvmify.describe((x,))
    for architecture in ("sm_90a", "sm_80"):
        program = compiled(artifact, architecture)
        saved.add(arguments, [0], [], [], [0, 1, 2, 3], 0, program, "", False)
    assert [": not used" in line for line in saved.explain()] == [True, False]

    del results, result, given, gpu, module, saved
    waits = fake.synchronizations()
    gc.collect()
    # Kernels may still run: their library stays, with its constants on both GPUs, …
    assert (fake.blocks(), fake.synchronizations()) == (2, waits)
    constant = compiled(compile(exported_constant(), target), "sm_80")
    assert fake.initializations() == 0
    results = constant.forward([])  # … until the next one is loaded.
    assert (fake.initializations(), fake.synchronizations()) == (1, waits + 3)
    assert torch.equal(fake.to_cpu(results[0]), torch.arange(6.0) * 2)
    assert results[0].device == torch.device("cuda", 0)
    assert fake.blocks() == 2, fake.blocks()
    sys.stdout.write("done\n")


main()
