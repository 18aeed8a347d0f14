"""Show that an installed wheel compiles a model (``builds``), or finds it on disk (``loads``).

A path as second argument is where it saves the model, for a C++ program.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import tvmify


@tvmify.tvmify(target="llvm", strict=True)
class Net(nn.Module):
    """A layer and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``(batch, 8)`` from ``(batch, 16)``."""
        return torch.relu(self.layer(x))


package = Path(str(tvmify.__file__)).resolve().parent
if not package.is_relative_to(Path(sys.prefix).resolve()):
    sys.exit(f"tvmify was imported from {package}, which is not the environment of the wheel")

torch.manual_seed(0)
net = Net().eval()
x = torch.randn(4, 16)
with torch.inference_mode():
    torch.testing.assert_close(net(x), torch.relu(nn.functional.linear(x, *net.layer.parameters())))
    net(x)

info = net.cache_info()
expected = {"builds": (1, 0), "loads": (0, 1)}[sys.argv[1]]
if (info.builds, info.disk_hits) != expected:
    sys.exit(f"expected (builds, disk_hits) = {expected}, got {info}")
if sys.argv[1] == "loads" and "tvm" in sys.modules:
    sys.exit("a warm process imported tvm")
print(f"The wheel {sys.argv[1]}: {info}")
for path in sys.argv[2:]:
    tvmify.save(net, path, strict=True)
