"""``torch.nn.attention.flex_attention`` in graphs of ``torch.compile``.

Its scores and masks are functions of the user's, which no operator can take. So the graph calls
what computes it in eager, and AOTAutograd records the operators in there.
"""

from __future__ import annotations

import copy

import torch
from torch import fx
from torch._C import DispatchKey


def spell_attention(module: fx.GraphModule) -> tuple[fx.GraphModule, bool]:
    """Return a graph with functions in place of this operator, and whether there are any."""
    operator = torch.ops.higher_order.flex_attention
    if not module.graph.find_nodes(op="call_function", target=operator):
        return module, False
    spelt = fx.GraphModule(module, copy.deepcopy(module.graph))
    for node in spelt.graph.find_nodes(op="call_function", target=operator):
        node.target = operator.py_kernels[DispatchKey.CompositeExplicitAutograd]
    spelt.recompile()
    return spelt, True
