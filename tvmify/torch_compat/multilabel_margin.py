"""The loss of ``nn.MultiLabelMarginLoss`` in recorded code.

PyTorch's own decomposition also adds the losses of the places after the last label of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx
from torch.nn import _reduction


def multilabel_margin_loss(
    x: torch.Tensor, target: torch.Tensor, reduction: int = _reduction.get_enum("mean")
) -> torch.Tensor:
    """Return the loss as eager computes it: the labels of a row end at its first -1."""
    scores, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = torch.arange(scores.shape[1], device=x.device)
    is_label = (labels == -1).cumsum(1) == 0
    is_target = ((labels[:, :, None] == classes) & is_label[:, :, None]).any(1)
    of_labels = scores.gather(1, labels.where(is_label, 0))
    losses = (1 - of_labels[:, :, None] + scores[:, None]).relu()
    counts = is_label[:, :, None] & ~is_target[:, None]
    loss = losses.where(counts, 0).sum((1, 2)) / scores.shape[1]
    if reduction == _reduction.get_enum("none"):
        return loss.reshape(x.shape[:-1])
    return loss.mean() if reduction == _reduction.get_enum("mean") else loss.sum()


def spell_out(module: torch.nn.Module) -> None:
    """Replace the loss in a graph of Dynamo's, and the graphs in it: AOTAutograd decomposes it."""
    for each in module.modules():
        if isinstance(each, fx.GraphModule):
            nodes = each.graph.find_nodes(op="call_function", target=F.multilabel_margin_loss)
            for node in nodes:
                node.target = _of_function
            if nodes:
                each.recompile()


def _of_function(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    return multilabel_margin_loss(input, target, _reduction.get_enum(reduction))
