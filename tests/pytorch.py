"""The installed version of PyTorch, for tests of what differs between versions."""

from __future__ import annotations

import torch

from tvmify.torch_compat import versions

#: Whether it is the oldest supported one, which does several things otherwise.
IS_2_11 = versions.minor(torch.__version__) == "2.11"
