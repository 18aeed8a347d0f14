"""Refuses programs before anything is translated."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tvmify.compiler.aten import operators
from tvmify.errors import NeedsPython, UnsupportedOperator, UnsupportedTarget

#: Operators that take functions, and that ``torch.compile`` compiles with our backend.
_WITH_DYNAMO = ("cond", "while_loop", "flex_attention")
#: Operators whose tensors all have one type in eager PyTorch.
_PRODUCTS = frozenset(
    "linear matmul mm bmm mv dot addmm addmv baddbmm conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d convolution".split()
)
#: Arguments of operators that become tensors if they are numbers; one that is too large becomes
#: infinity there. Others are converted to the tensor's type, which raises an error.
_OPERANDS = ("self", "other", "exponent")
#: Types of arguments that may be ints or floats.
_NUMBERS = ("number", "Optional[number]")


def refuse(nodes: Iterable[fx.Node]) -> None:
    """Refuse these calls of operators, if there are any.

    Raises
    ------
    UnsupportedOperator
        There are some; the message names all of them, to spare the user finding them one by one.
    """
    names = [operators.name(node) for node in nodes]
    if names:
        raise UnsupportedOperator(names)


def refuse_functions(program: ExportedProgram) -> None:
    """Refuse operators that take functions of the user's, as ``torch.cond`` does.

    Raises
    ------
    NeedsPython
        There are some.
    """
    names = [
        node.target.name()
        for node in operators.calls(program.graph)
        if isinstance(node.target, HigherOrderOperator) and node.target.name() in _WITH_DYNAMO
    ]
    if names:
        raise NeedsPython(
            f"TVM cannot compile operators that take functions: {', '.join(sorted(set(names)))}",
            'Use torch.compile(model, backend="tvmify"), which compiles them and the code around '
            "them.",
        )


def refuse_writes_to_lists(program: ExportedProgram) -> None:
    """Refuse PyTorch's operators that write to lists of tensors, such as ``_foreach_add_``: what
    tensors of a list share, with each other or with weights, is lost when writes are removed.

    Raises
    ------
    UnsupportedOperator
        There are some.
    """
    refuse(
        node
        for node in operators.calls(program.graph)
        if operators.is_mutating(node)
        and node.target.namespace == "aten"
        and any(
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in node.target._schema.arguments
            if isinstance(argument.type, torch.ListType)
        )
    )


def refuse_errors(program: ExportedProgram) -> None:
    """Refuse calls that recording lets pass, and that raise an error in eager PyTorch.

    Raises
    ------
    UnsupportedOperator
        There is one: a product of tensors of different types, or a number that the type of the
        result cannot hold, as in ``x.half().clamp(max=1e6)``.
    """
    for node in operators.calls(program.graph):
        if reason := _mixed_types(node) or _overflow(node):
            raise UnsupportedOperator([operators.name(node)], reason)


def _mixed_types(node: fx.Node) -> str | None:
    if operators.base_name(node) not in _PRODUCTS:
        return None
    values = (argument.meta.get("val") for argument in node.all_input_nodes)
    dtypes = {str(value.dtype) for value in values if isinstance(value, torch.Tensor)}
    return f"its tensors have {' and '.join(sorted(dtypes))}" if len(dtypes) > 1 else None


def _overflow(node: fx.Node) -> str | None:
    result = node.meta.get("val")
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(result, torch.Tensor):
        return None
    if result.dtype is torch.bool or result.is_complex():
        return None
    is_float = result.is_floating_point()
    limits = (torch.finfo if is_float else torch.iinfo)(result.dtype)
    low = limits.min or -limits.max  # eager wraps negative numbers around to unsigned ones
    given = operators.arguments(node)
    for argument in node.target._schema.arguments:
        value = given[argument.name]
        is_number = type(value) is (float if is_float else int) and str(argument.type) in _NUMBERS
        is_converted = is_number and argument.name not in _OPERANDS and math.isfinite(value)
        if is_converted and not low <= value <= limits.max:
            return f"{argument.name}={value} does not fit in {result.dtype}"
    return None


def refuse_quantization(program: ExportedProgram) -> None:
    """Refuse operators that make quantized tensors, which recording takes for those of floats.

    Raises
    ------
    UnsupportedOperator
        There are some.
    """
    calls = operators.calls(program.graph)
    refuse(node for node in calls if operators.base_name(node).startswith("quantize_per_"))


def refuse_other_devices(program: ExportedProgram) -> None:
    """Refuse a program whose results are on another device than its arguments and weights.
    Intermediate values on other devices do no harm: compiled, they are computed on that device.

    Raises
    ------
    UnsupportedTarget
        The devices differ; the message names both.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    signature = program.graph_signature
    constant = InputKind.CONSTANT_TENSOR
    inputs = [spec.arg for spec in signature.input_specs if spec.kind is not constant]
    results = [spec.arg for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    given, returned = (
        {value.device.type for arg in args if (value := _value(nodes, arg)) is not None}
        for args in (inputs, results)
    )
    if given and not returned <= given:
        raise UnsupportedTarget(
            f"inputs are on {', '.join(sorted(given))}, results on {', '.join(sorted(returned))}",
            "Move the results after the call.",
        )


def _value(nodes: dict[str, fx.Node], arg: object) -> torch.Tensor | None:
    node = nodes.get(getattr(arg, "name", ""))
    value = None if node is None else node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None
