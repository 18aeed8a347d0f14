"""Which ATen operators are broken into simpler ones before the import, and which stay whole."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

aten = torch.ops.aten

#: Operators that keep their meaning here although torch would decompose them: their converters
#: say more to the schedules (one matmul, one attention) than the twenty operators inside would.
WHOLE = (
    aten.gelu.default,
    aten.hardsigmoid.default,
    aten.hardswish.default,
    aten.layer_norm.default,
    aten.linear.default,
    aten.matmul.default,
    aten.scaled_dot_product_attention.default,
    aten.silu.default,
    aten.upsample_bicubic2d.vec,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
)


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Return the program in core ATen, functional, with the operators of `WHOLE` kept."""
    table = torch.export.default_decompositions()
    for operator in WHOLE:
        table.pop(operator, None)
    return program.run_decompositions(table)
