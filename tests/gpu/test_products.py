"""Products of one row on a GPU: both forms are right, and the faster one is used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tvmify
from tests.compiler.gpu_programs import ALWAYS_A_KERNEL, exported
from tests.tolerances import assert_close_to_reference
from tvmify.compiler import compile
from tvmify.runtime import Executor, PackedWeights, cpu_features
from tvmify.target import target_for

pytestmark = pytest.mark.usefixtures("inference")


def layers(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768, bias=False))
    return net.eval().to("cuda", dtype), torch.randn(1, 1, 768, device="cuda", dtype=dtype)


def test_kernels_match_libraries(dtype: torch.dtype):
    net, x = layers(dtype)
    target = target_for("cuda", "cuda", cpu_features(), torch.cuda.get_device_capability())
    artifact = compile(exported(net, x), target, tuning=ALWAYS_A_KERNEL)
    assert list(artifact.report["kernels"].values()).count("row product") == 2
    executor = Executor(artifact)
    tensors = dict(net.named_parameters())
    executor.bind([tensors[name].detach() for name in artifact.weights], PackedWeights())
    assert_close_to_reference(executor.call()((x,)), net, (x,))


def test_both_forms_are_timed_once(dtype: torch.dtype):
    net, x = layers(dtype)
    fast = tvmify.tvmify(net, strict=True, tune="quick")
    assert_close_to_reference(fast(x), net, (x,))
    assert "tuned: 2 workloads, 2 measured, 0 known before" in str(fast.explain())
    again = tvmify.tvmify(nn.Sequential(net, nn.ReLU()).eval(), strict=True, tune="quick")
    again(x)
    assert "tuned: 2 workloads, 0 measured, 2 known before" in str(again.explain())
