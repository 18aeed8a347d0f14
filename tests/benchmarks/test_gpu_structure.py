"""Counts of launches and bytes in programs for GPUs."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.gpu_structure import structure
from tests.compiler.gpu_programs import needs_nvcc


@needs_nvcc
def test_a_small_network_is_counted():
    net = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 16)).eval().half()
    found = structure(net, (torch.randn(8, 64).half(),), "sm_80")
    assert found.operators == {"linear": 2}
    assert found.kernels == {"elementwise": 1}
    # Each product reads its input, weight and bias; the kernel reads and writes 8 by 32.
    first, second = 8 * 64 + 32 * 64 + 32 + 8 * 32, 8 * 32 + 16 * 32 + 16 + 8 * 16
    assert found.moved == 2 * (first + second + 2 * 8 * 32)
    assert len(found.registers) == 1 and 0 < found.registers[0] < 256
    assert "| net | 3 | 1 | 2 linear |" in found.row("net")
