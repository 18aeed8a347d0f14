"""Which ATen operators are broken into simpler ones before the import, and which stay whole."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

aten = torch.ops.aten

#: Operators that keep their meaning here although torch would decompose them: their converters
#: say more to the schedules (one matmul, one attention) than the twenty operators inside would.
WHOLE = (
    aten.gelu.default,
    aten.gru.input,
    aten.gru_cell.default,
    aten.hardsigmoid.default,
    aten.hardswish.default,
    aten.layer_norm.default,
    aten.linear.default,
    aten.lstm.input,
    aten.lstm_cell.default,
    aten.matmul.default,
    aten.one_hot.default,
    aten.scaled_dot_product_attention.default,
    aten.mish.default,
    aten.silu.default,
    aten.upsample_bicubic2d.vec,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
)

#: Asserts the dtype and device that the tensor had at export; they are part of every key.
CHECK = aten._assert_tensor_metadata.default


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Return the program in core ATen, functional, with the operators of `WHOLE` kept."""
    table = torch.export.default_decompositions()
    for operator in WHOLE:
        table.pop(operator, None)
    program = program.run_decompositions(table)
    for node in program.graph.find_nodes(op="call_function", target=CHECK):
        program.graph.erase_node(node)
    return program
