"""ATen program → core ATen: which operators are broken into simpler ones, and which stay whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._export.utils import (
    _collect_all_valid_cia_ops_for_aten_namespace,
    _special_op_to_preserve_cia,
)
from torch.export import ExportedProgram, exported_program

from tvmify.compiler.frontend.constants import fold_constants
from tvmify.compiler.frontend.einsum import einsum
from tvmify.compiler.frontend.fast_paths import multi_head_attention, transformer_encoder_layer
from tvmify.compiler.frontend.refusals import refuse_other_devices
from tvmify.compiler.frontend.sharing import Sharing, sharing
from tvmify.compiler.frontend.spelt_attention import recognise_attention
from tvmify.torch_compat.recurrent_shapes import recurrent_shapes
from tvmify.torch_compat.tracing import fake_modes, forget_tensors

aten = torch.ops.aten

_Table: TypeAlias = dict[torch._ops.OperatorBase, Callable[..., Any]]

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
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    aten.scaled_dot_product_attention.default,
    aten.mish.default,
    aten.silu.default,
    aten.upsample_bicubic2d.vec,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
)

#: Operators that raise depending on the values of tensors: broken up, they would check by effects
#: that have an order of their own. PyTorch computes them, and raises as in eager.
RAISING = (
    aten.linalg_cholesky.default,
    aten.linalg_inv.default,
    aten.linalg_ldl_factor.default,
    aten.linalg_lu_factor.default,
    aten.linalg_solve.default,
)

#: Broken up it becomes `index_put`, for which a negative position counts from the end; here it is
#: an error. PyTorch computes it.
STRICT_POSITIONS = (aten.index_add.default,)

#: Asserts the dtype and device that the tensor had at export; they are part of every key.
CHECK = aten._assert_tensor_metadata.default


def _adaptive_mean(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """One result on each axis is a mean; torch's own decomposition restrides it, too."""
    if all(size == 1 for size in sizes):
        return x.mean(list(range(-len(sizes), 0)), keepdim=True)
    if len(sizes) == 1:
        return aten._adaptive_avg_pool2d(x.unsqueeze(-2), [1, *sizes]).squeeze(-2)
    return aten._adaptive_avg_pool2d(x, sizes)


def _of_floats(decomposition: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Keep an operator whole where its result is of integers, which this rounds another way."""
    result = decomposition(*arguments, **options)
    return result if result.is_floating_point() else NotImplemented


@dataclass(frozen=True)
class Decomposed:
    """A program in core ATen, without writes, and whose memory was whose before.

    Attributes
    ----------
    program
        With the operators of `WHOLE` kept, constants folded, and attention recognised.
    shared
        What a program without writes cannot say.
    """

    program: ExportedProgram
    shared: Sharing


def decompose(program: ExportedProgram) -> Decomposed:
    """Break a program into the operators that are translated; it needs no TVM.

    Raises
    ------
    UnsupportedOperator
        It writes to or returns memory in a way that has no compiled form.
    UnsupportedTarget
        Results are on another device than arguments.
    """
    refuse_other_devices(program)
    shared = sharing(program)
    program = _in_core_aten(program)
    fold_constants(program)
    recognise_attention(program)
    forget_tensors(*fake_modes(program.graph))
    return Decomposed(program, shared)


def _in_core_aten(program: ExportedProgram) -> ExportedProgram:
    composite, table = _tables()
    # What `ExportedProgram.run_decompositions` does with a table, but for looking through all
    # operators of torch for those that may be kept: that takes longer than a small program does.
    with recurrent_shapes():
        program = exported_program._decompose_exported_program(
            program,
            cia_to_decomp=dict(composite),
            python_decomp_table=dict(table),
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )
    for node in program.graph.find_nodes(op="call_function", target=CHECK):
        program.graph.erase_node(node)
    return program


@functools.cache
def _tables() -> tuple[_Table, _Table]:
    """Return our rules for operators that PyTorch composes of others, and those for the rest."""
    # The part for ATen alone: reading the whole asks for the operators of every library, which
    # takes a tenth of a second each time, and none of them is ours.
    table = torch.export.default_decompositions().decomp_table
    ours = {*WHOLE, *RAISING, *STRICT_POSITIONS, *filter(_is_random, table)}
    for operator in ours:
        table.pop(operator, None)
    for operator in (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default):
        table[operator] = _adaptive_mean
        ours.add(operator)
    table[aten.einsum.default] = einsum
    ours.add(aten.einsum.default)
    table[aten._native_multi_head_attention.default] = multi_head_attention
    table[aten._transformer_encoder_layer_fwd.default] = transformer_encoder_layer
    for name in ("default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor"):
        operator = getattr(aten.linspace, name)
        table[operator] = functools.partial(_of_floats, table[operator])
    composite = _collect_all_valid_cia_ops_for_aten_namespace()
    # Without a rule, PyTorch composes them as it does in eager.
    return (
        {each: table.get(each, _special_op_to_preserve_cia) for each in ours & composite},
        {each: rule for each, rule in table.items() if each not in composite},
    )


def _is_random(operator: torch._ops.OperatorBase) -> bool:
    """Whether PyTorch's own kernel has to draw the numbers, to draw the same as in eager.

    What eager PyTorch itself composes of other operators (dropout) is not meant.
    """
    return (
        isinstance(operator, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in operator.tags
        and not operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    )
