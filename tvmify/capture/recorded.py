"""Graphs recorded by another tracer."""

from __future__ import annotations

import torch


class RecordedGraph(torch.fx.GraphModule):
    """A graph of torch's functions without control flow, recorded for one kind of call.

    It is not scripted, since TorchScript would keep nothing that ``torch.export`` loses.
    """
