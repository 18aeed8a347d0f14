"""Code that catches errors of the modules it calls, during the recording."""

from typing import Any

import torch
from torch import nn

from tvmify import tvmify


class Offset(nn.Module):
    def forward(self, x, *, offset):
        return x + offset


class Chain(nn.Module):
    """Tries which layers accept an argument, as speaker models of SpeechBrain do."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Offset(), nn.Sequential(nn.Tanh()), Offset()])

    def forward(self, x, *rest):  # TorchScript refuses star arguments
        for block in self.blocks:
            try:
                x = block(x, offset=2)
            except TypeError:
                x = block(x)
        return x


def test_a_module_may_fail_within_another() -> None:
    net = Chain().eval()
    fast: Any = tvmify(net, cache=False, strict=True)
    x = torch.linspace(-1, 1, 5)
    torch.testing.assert_close(fast(x), net(x))
