"""ATen program → core ATen: which operators are decomposed, and which are kept."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._export.utils import (
    _collect_all_valid_cia_ops_for_aten_namespace,
    _special_op_to_preserve_cia,
)
from torch.export import ExportedProgram, exported_program

from tvmify.artifact.recorded_shapes import symbol_names
from tvmify.compiler.frontend.checks import keep_checks
from tvmify.compiler.frontend.constants import fold_constants
from tvmify.compiler.frontend.decomposed_attention import recognize_attention
from tvmify.compiler.frontend.einsum import einsum
from tvmify.compiler.frontend.expansion import Rules, expand
from tvmify.compiler.frontend.fast_paths import multi_head_attention, transformer_encoder_layer
from tvmify.compiler.frontend.refusals import (
    refuse_errors,
    refuse_functions,
    refuse_other_devices,
    refuse_quantization,
    refuse_writes_to_lists,
)
from tvmify.compiler.frontend.sharing import Sharing, sharing
from tvmify.compiler.frontend.writes import drop_whole_slices
from tvmify.torch_compat.multilabel_margin import multilabel_margin_loss
from tvmify.torch_compat.recurrent_shapes import recurrent_shapes
from tvmify.torch_compat.tracing import fake_modes, forget_tensors

aten = torch.ops.aten

#: Operators that torch would decompose but that are kept: their converters tell the schedules more
#: (one matmul, one attention) than the twenty operators inside.
WHOLE = (
    aten.gelu.default,
    aten.gru.input,
    aten.gru_cell.default,
    aten.hardsigmoid.default,
    aten.hardswish.default,
    # Decomposed, it becomes `index_put`, for which a negative index counts from the end; here it
    # is an error. Not `index_copy`, with which static caches of keys and values are written.
    aten.index_add.default,
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
    aten.rnn_relu.input,
    aten.rnn_tanh.input,
    aten.scaled_dot_product_attention.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.mish.default,
    aten.silu.default,
    aten.unfold_backward.default,
    aten.upsample_bicubic2d.vec,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
)

#: Operators that raise depending on the values of tensors: decomposed, they would check by ordered
#: effects. PyTorch computes them, and raises as in eager.
RAISING = (
    aten.binary_cross_entropy.default,
    aten.linalg_cholesky.default,
    aten.linalg_inv.default,
    aten.linalg_ldl_factor.default,
    aten.linalg_lu_factor.default,
    aten.linalg_solve.default,
    aten.linalg_tensorinv.default,
)

#: Asserts the dtype and device at export, which are part of every key.
CHECK = aten._assert_tensor_metadata.default


def _adaptive_mean(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Pooling to one element per axis is a mean; torch's own decomposition also restrides it."""
    if all(size == 1 for size in sizes):
        return x.mean(list(range(-len(sizes), 0)), keepdim=True)
    if len(sizes) == 1 and not isinstance(x.shape[-1], int):  # PyTorch itself pools any length
        return aten._adaptive_avg_pool2d(x.unsqueeze(-2), [1, *sizes]).squeeze(-2)
    if len(sizes) == 1:
        return aten._adaptive_avg_pool2d(x.unsqueeze(-1), [*sizes, 1]).squeeze(-1)
    return aten._adaptive_avg_pool2d(x, sizes)


# As in convolutions, a sequence is an image of one column; PyTorch pools an image of one row.


def _max_pool_line(
    x: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> torch.Tensor:
    column = [*size, 1], [*(stride or size), 1], [*padding, 0], [*dilation, 1]
    return aten.max_pool2d_with_indices(x.unsqueeze(-1), *column, ceil_mode)[0].squeeze(-1)


def _average_pool_line(
    x: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    *modes: bool,
) -> torch.Tensor:
    column = [*size, 1], [*(stride or size), 1], [*padding, 0]
    return aten.avg_pool2d(x.unsqueeze(-1), *column, *modes).squeeze(-1)


def _resize_line(
    resize: Callable[..., torch.Tensor], x: torch.Tensor, size: list[int] | None, *given: Any
) -> torch.Tensor:
    """Resize a sequence as images are; torch's decomposition makes infinities at an end NaN."""
    *aligned, factors = given
    sizes, factors = size and [*size, 1], factors and [*factors, 1.0]
    return resize(x.unsqueeze(-1), sizes, *aligned, factors).squeeze(-1)


def _resize_volume(
    x: torch.Tensor, size: list[int] | None, aligned: bool, factors: list[float] | None
) -> torch.Tensor:
    """Resize the slices as images, and then the depth of each pixel."""
    resize = aten.upsample_bilinear2d.vec
    batch, channels, depth = x.shape[:3]
    images = x.reshape(batch, channels * depth, *x.shape[3:])
    images = resize(images, size and size[1:], aligned, factors and factors[1:])
    height, width = images.shape[2:]
    pixels = images.reshape(batch, channels, depth, height * width)
    sizes, factors = size and [size[0], height * width], factors and [factors[0], 1.0]
    pixels = resize(pixels, sizes, aligned, factors)
    return pixels.reshape(batch, channels, pixels.shape[2], height, width)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Torch's own decomposition is a subscript, which reads the value of an index without axes."""
    return aten.index(x.reshape(-1), [index.reshape(-1)]).reshape(index.shape)


def _threshold(
    decomposition: Callable[..., torch.Tensor], x: torch.Tensor, threshold: Any, value: Any
) -> torch.Tensor:
    """Compare integers with an integer, as eager does; the decomposition makes them floats."""
    if not x.is_floating_point():
        threshold, value = int(threshold), int(value)
    return decomposition(x, threshold, value)


def _of_floats(decomposition: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Keep an operator with an integer result, which the decomposition rounds differently."""
    result = decomposition(*arguments, **options)
    return result if result.is_floating_point() else NotImplemented


@dataclass(frozen=True)
class Decomposed:
    """A program in core ATen without writes, and how tensors shared memory before.

    Attributes
    ----------
    program
        The program, with the operators of `WHOLE` kept, constants folded, and attention recognized.
        It has no weights: compiled code takes them as arguments.
    shared
        How tensors share memory, which a program without writes cannot express.
    """

    program: ExportedProgram
    shared: Sharing

    def copy(self) -> Decomposed:
        """Return a program with its own graph, since the translation changes it."""
        program = copy.copy(self.program)
        graph_module = program.graph_module
        graph = copy.deepcopy(graph_module.graph)
        for node, original in zip(graph.nodes, graph_module.graph.nodes, strict=True):
            node.name = original.name  # even a name of a builtin, such as "input"
        program._graph_module = torch.fx.GraphModule(graph_module, graph)
        return Decomposed(program, self.shared)


def decompose(program: ExportedProgram) -> Decomposed:
    """Decompose a program into the operators that are translated; does not need TVM.

    Raises
    ------
    UnsupportedOperator
        It writes to or returns memory in an unsupported way, or has an operator that takes
        functions, that raises an error, or that makes quantized tensors.
    UnsupportedTarget
        Results are on another device than the arguments.
    """
    refuse_functions(program)
    refuse_other_devices(program)
    refuse_writes_to_lists(program)
    refuse_errors(program)
    refuse_quantization(program)
    shared, names, recorded = sharing(program), symbol_names(program), program
    program = _in_core_aten(keep_checks(program, shared))
    drop_whole_slices(program.graph)
    fold_constants(program)
    recognize_attention(program)
    if symbol_names(program) != names:  # some turned out to be equal, or constants
        shared = sharing(recorded)
    forget_tensors(*fake_modes(program.graph))
    program._state_dict = {}
    return Decomposed(program, shared)


def _in_core_aten(program: ExportedProgram) -> ExportedProgram:
    composite, table = _tables()
    with recurrent_shapes():
        expanded = expand(program, composite, table)
        # As `ExportedProgram.run_decompositions` with a table, but without searching all operators
        # of torch for ones to keep, which takes longer than a small program.
        program = expanded or exported_program._decompose_exported_program(
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
def _tables() -> tuple[Rules, Rules]:
    """Return our rules for composite operators, and those for all others."""
    # Only ATen's part: reading the whole table visits the operators of every library, none of them
    # ours, and takes a tenth of a second each time.
    table = torch.export.default_decompositions().decomp_table
    ours = {*WHOLE, *RAISING, *filter(_is_random, table)}
    for operator in ours:
        table.pop(operator, None)
    own = {
        aten.adaptive_avg_pool1d.default: _adaptive_mean,
        aten.adaptive_avg_pool2d.default: _adaptive_mean,
        aten.max_pool1d.default: _max_pool_line,
        aten.avg_pool1d.default: _average_pool_line,
        aten.upsample_linear1d.vec: functools.partial(_resize_line, aten.upsample_bilinear2d.vec),
        aten.upsample_nearest1d.vec: functools.partial(_resize_line, aten.upsample_nearest2d.vec),
        aten.upsample_trilinear3d.vec: _resize_volume,
        aten.einsum.default: einsum,
        aten.multilabel_margin_loss.default: multilabel_margin_loss,
        aten.take.default: _take,
    }
    table |= own
    ours |= own.keys()
    # A copy of a literal, as a recording of the whole program has it.
    table[aten.lift_fresh_copy.default] = aten.clone.default
    table[aten._native_multi_head_attention.default] = multi_head_attention
    table[aten._transformer_encoder_layer_fwd.default] = transformer_encoder_layer
    for name in ("default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor"):
        operator = getattr(aten.linspace, name)
        table[operator] = functools.partial(_of_floats, table[operator])
    operator = aten.threshold.default
    table[operator] = functools.partial(_threshold, table[operator])
    composite = _collect_all_valid_cia_ops_for_aten_namespace()
    # Without a rule, PyTorch decomposes them as in eager.
    return (
        {each: table.get(each, _special_op_to_preserve_cia) for each in ours & composite},
        {each: rule for each, rule in table.items() if each not in composite},
    )


def _is_random(operator: torch._ops.OperatorBase) -> bool:
    """Whether PyTorch's own kernel must draw the numbers, to draw the same as in eager. Operators
    that eager PyTorch itself decomposes (dropout) do not count.
    """
    return (
        isinstance(operator, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in operator.tags
        and not operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    )
