"""Names of operators that ``torch.fx`` cannot write into the code of a graph."""

from __future__ import annotations

import torch


def avoid_keywords() -> None:
    """Let code of graphs call overloads named ``from``, a keyword of Python, by global variables.

    ``torch.fx`` writes the qualified name of what PyTorch defines, ``torch.ops.aten.random_.from``.
    """
    for packet in (torch.ops.aten.random, torch.ops.aten.random_):
        getattr(packet, "from").__module__ = __name__
