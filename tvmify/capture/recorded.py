"""Graphs that another tracer has recorded."""

from __future__ import annotations

import torch


class RecordedGraph(torch.fx.GraphModule):
    """A graph of torch's functions without control flow, recorded for one kind of call.

    It is not scripted: there is nothing that TorchScript could keep and ``torch.export`` could not.
    """
