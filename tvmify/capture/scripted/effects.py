"""The side effects of a TorchScript node: writes, draws, and reads of tensor elements."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from tvmify.capture.scripted.operators import qualified_name

#: Nodes with effects that their schemas do not show.
EFFECTS = frozenset(
    "prim::SetAttr prim::RaiseException prim::Print aten::warn prim::Enter prim::Exit "
    "aten::set_grad_enabled aten::manual_seed".split()
)
#: Properties of a tensor that depend on its shape and dtype, not on its elements.
_OF_THE_SHAPE = frozenset(
    "aten::size aten::dim aten::numel aten::len aten::is_floating_point aten::is_complex "
    "aten::is_signed aten::element_size prim::dtype prim::device prim::layout prim::is_cpu "
    "prim::is_cuda prim::is_meta prim::is_mps prim::is_xpu prim::is_sparse prim::is_sparse_csr "
    "prim::is_quantized prim::is_nested prim::itemsize prim::nbytes aten::__is__ "
    "aten::__isnot__ aten::has_torch_function aten::is_same_size".split()
)
_NUMBERS = frozenset("IntType FloatType BoolType NumberType ComplexType StringType".split())
#: Arguments whose elements may decide the shape of the result; of indexing, only masks.
_SHAPED_BY_ELEMENTS = ("dynamic_output_shape", "data_dependent_output")
_INDEXING = ("aten::index", "aten::_unsafe_index")
#: Random operators that draw nothing if one of these arguments is false or 0.
_QUIET_WITHOUT = {
    "aten::dropout": (2,),
    "aten::alpha_dropout": (2,),
    "aten::feature_dropout": (2,),
    "aten::feature_alpha_dropout": (2,),
    "aten::rrelu": (3,),
    "aten::scaled_dot_product_attention": (4,),
    "aten::lstm.input": (5, 6),
    "aten::gru.input": (5, 6),
    "aten::rnn_tanh.input": (5, 6),
    "aten::rnn_relu.input": (5, 6),
}


def writes(node: torch._C.Node) -> bool:
    """Whether a node changes one of its inputs."""
    return "!" in node.schema()


def is_view(node: torch._C.Node) -> bool:
    """Whether a result of a node may be one of its inputs, or share memory with one."""
    return re.search(r"Tensor\([a-z]", node.schema().rpartition("->")[2]) is not None


def is_random(node: torch._C.Node, known: Callable[[torch._C.Value], Any]) -> bool:
    """Whether a node may draw from a generator.

    Parameters
    ----------
    known
        Returns the constant value of an input, or anything true if that is unknown.
    """
    name = qualified_name(node)
    if not node.isNondeterministic() and "nondeterministic_seeded" not in _tags(name):
        return False
    inputs = list(node.inputs())
    return all(known(inputs[place]) for place in _QUIET_WITHOUT.get(name, ()))


def reads_elements(node: torch._C.Node) -> bool:
    """Whether a number or shape in a node's results depends on elements of tensors."""
    kind = node.kind()
    if kind in _OF_THE_SHAPE:
        return False
    name = qualified_name(node)
    if name == "aten::where":
        return True  # only masks count
    if kind not in _INDEXING and any(tag in _tags(name) for tag in _SHAPED_BY_ELEMENTS):
        return True
    takes_tensors = any(_element(value).kind() == "TensorType" for value in node.inputs())
    return takes_tensors and any(_element(v).kind() in _NUMBERS for v in node.outputs())


def computes(node: torch._C.Node) -> bool:
    """Whether a node is an operator that computes elements, rather than a view."""
    return (
        node.kind().startswith("aten::")
        and not is_view(node)
        and any(_element(value).kind() == "TensorType" for value in node.outputs())
    )


def is_tensor(value: torch._C.Value) -> bool:
    """Whether a value is a tensor and never None."""
    return value.type().kind() == "TensorType"


def _element(value: torch._C.Value) -> Any:
    type_: Any = value.type()
    while type_.kind() in ("ListType", "OptionalType"):
        type_ = type_.getElementType()
    return type_


@functools.cache
def _tags(name: str) -> frozenset[str]:
    """Return the names of an operator's tags."""
    kind, _, overload = name.partition(".")
    namespace, _, operator = kind.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), operator)
        found = getattr(packet, overload or "default")
    except (AttributeError, RuntimeError):
        return frozenset()  # one of TorchScript's own
    return frozenset(tag.name for tag in found.tags)
