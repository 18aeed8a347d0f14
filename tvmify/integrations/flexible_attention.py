"""``torch.nn.attention.flex_attention`` in graphs of ``torch.compile``.

Its scores and masks are functions of the user, which no operator takes. So the graph calls the
eager implementation, and AOTAutograd records the operators inside.
"""

from __future__ import annotations

import copy

import torch
from torch import fx
from torch._C import DispatchKey


def inline_flex_attention(module: fx.GraphModule) -> tuple[fx.GraphModule, bool]:
    """Return a graph without this operator, and whether the given graph had any."""
    operator = torch.ops.higher_order.flex_attention
    if not module.graph.find_nodes(op="call_function", target=operator):
        return module, False
    inlined = fx.GraphModule(module, copy.deepcopy(module.graph))
    for node in inlined.graph.find_nodes(op="call_function", target=operator):
        node.target = operator.py_kernels[DispatchKey.CompositeExplicitAutograd]
    inlined.recompile()
    return inlined, True
