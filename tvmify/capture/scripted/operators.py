"""Look up and call the operator of a TorchScript node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tvmify.capture.scripted.primitives import PREFERRED, PRIMITIVE_OVERLOADS, PRIMITIVES
from tvmify.capture.values import (
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    code_of,
    is_literal,
    recorded_contiguous,
)
from tvmify.errors import UnsupportedOperator

#: Overloads that take ``Tensor[]`` where the dispatcher takes ``Tensor?[]`` but are otherwise
#: equal.
_TWINS = {
    "aten::index.Tensor_hacked_twin": "aten::index.Tensor",
    "aten::_unsafe_index.Tensor_hacked_twin": "aten::_unsafe_index.Tensor",
    "aten::index_put.hacked_twin": "aten::index_put",
    "aten::index_put_.hacked_twin": "aten::index_put_",
    "aten::_index_put_impl_.hacked_twin": "aten::_index_put_impl_",
    "aten::_unsafe_index_put.hacked_twin": "aten::_unsafe_index_put",
}
#: Arguments that TorchScript passes as integers, by their type in the dispatcher's schema.
_ENUMERATIONS = {"ScalarType": DTYPES, "Layout": LAYOUTS, "MemoryFormat": MEMORY_FORMATS}
#: Literals of up to this many elements, such as shapes in traced graphs, are computed at capture.
_FOLDED_ELEMENTS = 64

Callee = Callable[[Sequence[Any]], Any]


def qualified_name(node: torch._C.Node) -> str:
    """Return the operator with its overload, e.g. ``aten::add.Tensor``."""
    schema = node.schema()
    return node.kind() if schema.startswith("(") else schema.partition("(")[0]


@functools.cache
def find_operator(name: str) -> Callee | None:
    """Return a function that takes an operator's inputs as the graph lists them.

    Parameters
    ----------
    name
        Operator and overload, e.g. ``aten::add.Tensor``.

    Returns
    -------
    Callee or None
        None for an unknown name.
    """
    kind, _, overload = name.partition(".")
    if kind == "aten::_convolution":
        return _convolution
    if name in PRIMITIVE_OVERLOADS:
        return lambda inputs: PRIMITIVE_OVERLOADS[name](*inputs)
    if kind not in PREFERRED:
        name = _TWINS.get(name, name)
        kind, _, overload = name.partition(".")
        try:
            torch._C._dispatch_find_schema_or_throw(kind, overload)
        except RuntimeError:
            pass
        else:
            return DispatcherOperator(kind, overload)
    if kind in PRIMITIVES:
        return lambda inputs: PRIMITIVES[kind](*inputs)
    return None


class Parameter(NamedTuple):
    """A parameter of a dispatcher operator."""

    name: str
    is_keyword_only: bool
    default: Any
    table: Sequence[Any] | None  # the values that TorchScript's integers mean


class DispatcherOperator:
    """An operator of the PyTorch dispatcher, called as a TorchScript node calls it."""

    def __init__(self, kind: str, overload: str) -> None:
        namespace, _, name = kind.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name)
        self.operator = getattr(packet, overload or "default")
        schema = self.operator._schema
        self.parameters = [
            Parameter(
                argument.name,
                argument.kwarg_only,
                argument.default_value,
                _ENUMERATIONS.get(str(argument.real_type).removeprefix("Optional[").rstrip("]")),
            )
            for argument in schema.arguments
        ]
        self._writes = schema.is_mutable
        self._random = torch.Tag.nondeterministic_seeded in self.operator.tags

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Call it with the inputs of a node."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter, value in zip(self.parameters, inputs, strict=True):
            if parameter.table is not None and isinstance(value, int):
                value = parameter.table[value]
            elif isinstance(value, list):
                value = list(value)  # export does not know our own list types
            if parameter.is_keyword_only:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        with self._modes([*args, *kwargs.values()]):
            if self.operator is torch.ops.aten.contiguous.default and not is_literal(args[0]):
                result = recorded_contiguous(*args, **kwargs)
            else:
                result = self.operator(*args, **kwargs)
        return list(result) if isinstance(result, list) else code_of(result)

    def _modes(self, arguments: list[Any]) -> AbstractContextManager[Any]:
        """Compute on literals immediately, outside the modes that record the program."""
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        literals = [tensor for tensor in tensors if is_literal(tensor)]
        stack = ExitStack()
        if not literals or not torch._C._len_torch_dispatch_stack():
            return stack
        if self._writes and is_literal(arguments[0]):
            raise UnsupportedOperator(
                [str(self.operator)], "the program writes into one of its constants"
            )
        small = all(tensor.numel() <= _FOLDED_ELEMENTS for tensor in literals)
        if small and len(literals) == len(tensors) and not self._writes and not self._random:
            from torch.utils._python_dispatch import _disable_current_modes

            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch._C.DisableTorchFunction())
        return stack


def _convolution(inputs: Sequence[Any]) -> Any:
    """Call the convolution that was traced as ``aten::_convolution``."""
    tensor, weight, bias, stride, padding, dilation, transposed, output_padding, groups = inputs[:9]
    spatial = weight.dim() - 2
    if transposed:
        convolve = getattr(torch.ops.aten, f"conv_transpose{spatial}d")
        overload = "default" if spatial == 1 else "input"
        return getattr(convolve, overload)(
            tensor, weight, bias, stride, padding, output_padding, groups, dilation
        )
    convolve = getattr(torch.ops.aten, f"conv{spatial}d").default
    return convolve(tensor, weight, bias, stride, padding, dilation, groups)
