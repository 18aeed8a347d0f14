"""Operators that PyTorch computes, called from inside the compiled program. An operator whose
converter is missing or gives up becomes a call of ``tvmify.aten`` (in ``native/aten_bridge.cpp``),
with the operator and its constant arguments as a small TorchScript graph. Tensors are passed
without a copy; results come from PyTorch's allocator. Sizes that vary are passed beside the
tensors, as one shape: those that are arguments of the operator, then those of its results, which
are checked.

TVM has no complex numbers: in compiled code they are real tensors with an additional axis of size
two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import tvm
from torch import fx
from torch._higher_order_ops.auto_functionalize import AsStridedViewInfo, SliceViewInfo
from torch.utils import _pytree as pytree
from tvm import relax

from tvmify.artifact import CALL_OF_TORCH
from tvmify.compiler.aten import operators
from tvmify.compiler.aten.functionalized import Written, can_functionalize
from tvmify.compiler.backend import is_for_gpu
from tvmify.compiler.sizes import Size, is_static
from tvmify.torch_compat.dtypes import dtype_name
from tvmify.torch_compat.layouts import inverse, memory_order

#: Complex dtypes and the dtypes of their parts.
PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
#: Types of arguments that may be sizes that vary.
_OF_SIZES = ("int", "Optional[int]", "List[int]", "number")

#: Returns the shape of a tensor that torch recorded.
Sizes = Callable[[torch.Tensor], Sequence[Size]]


def can_bridge(node: fx.Node, dtypes: frozenset[str]) -> bool:
    """Whether PyTorch can compute a call: all results are tensors of known shapes and dtypes.

    Parameters
    ----------
    node
        A call of an operator.
    dtypes
        Names of the dtypes that compiled code can hold.
    """
    target = operators.operator(node)
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target._schema.is_mutable and not can_functionalize(node):
        return False
    if operators.EMPTY in node.meta:  # its arguments are incomplete
        return False
    if target is torch.ops.aten.view.dtype:  # TorchScript mistakes the dtype for a size
        return False
    if target is torch.ops.aten.as_strided.default and not _lies_plainly(node.args[0]):
        return False
    values = _leaves(node.meta.get("val"))
    results = [values[i] for i in _used(node, len(values))]
    given = operators.arguments(node)
    for argument in operators.schema(node).arguments:
        sizes = [x for x in pytree.tree_leaves(given[argument.name]) if isinstance(x, tvm.ir.Expr)]
        if sizes and (
            str(argument.type) not in _OF_SIZES or any(str(s.ty.dtype) != "int64" for s in sizes)
        ):
            return False  # the graph has integers for these, and constants for others
    return bool(results) and all(
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and (tensor.dtype in PARTS or dtype_name(tensor.dtype) in dtypes)
        for tensor in results + [n.meta["val"] for n in _tensor_nodes(node)]
    )


def _lies_plainly(node: Any) -> bool:
    """Whether a tensor has memory in eager as it has in compiled code, where all are contiguous."""
    tensor = node.meta["val"]
    return tensor.is_contiguous() and tensor.storage_offset() == 0


def is_complex(node: fx.Node) -> bool:
    """Whether a call takes or returns complex numbers."""
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    return any(isinstance(t, torch.Tensor) and t.is_complex() for v in values for t in _leaves(v))


def bridge(
    node: fx.Node,
    env: dict[fx.Node, Any],
    emit: Callable[[relax.Expr], Any],
    sizes: Sizes,
    after: Any = None,
) -> Any:
    """Emit a call of PyTorch for an operator.

    Parameters
    ----------
    node
        See `can_bridge`.
    env
        The Relax values of the preceding nodes.
    emit
        Binds an expression to a variable.
    sizes
        Returns the shape of a tensor of the program, whose sizes may vary.
    after
        A tensor that must be computed before, if the order matters, as for random operators.

    Returns
    -------
    The Relax value of the result; a tuple if there are several, with None for unused ones.
    """
    nodes = _tensor_nodes(node)
    arguments = [env[_source(n)] for n in nodes] + ([] if after is None else [after])
    results = _leaves(node.meta["val"])
    used = _used(node, len(results))
    shapes = {i: shape_and_dtype(results[i], sizes) for i in used}
    graph = _Graph(node, nodes, len(arguments), shapes, sizes)
    types = [relax.TensorType(*shape) for shape in shapes.values()]
    ty = types[0] if len(types) == 1 else relax.TupleType(types)
    given = [relax.ShapeExpr(graph.sizes)] if graph.sizes else []
    text = tvm.ir.StringImm(str(graph))
    call = relax.op.call_pure_packed(CALL_OF_TORCH, text, *arguments, *given, ty_args=[ty])
    value = emit(call)
    if isinstance(node.meta["val"], torch.Tensor):
        return value
    known = {used[0]: value}
    if len(used) > 1:
        known = {place: emit(relax.TupleGetItem(value, i)) for i, place in enumerate(used)}
    return tuple(known.get(i) for i in range(len(results)))


def _used(node: fx.Node, results: int) -> list[int]:
    """Return which results of a call the program reads.

    The others are ignored: some, such as the bookkeeping of embedding_bag, do not have the shapes
    that their operator declares, and unused gradients are None.
    """
    if not isinstance(node.meta.get("val"), (tuple, list)):
        return [0]
    indices = [user.args[1] for user in node.users if user.users]
    return [i for i in range(results) if i in indices] or [0]


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _tensor_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the tensors among the arguments, each once."""
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _source(tensor: fx.Node) -> fx.Node:
    """Return what a tensor is expanded from: PyTorch's kernels are faster if they see that."""
    if tensor.target is not torch.ops.aten.expand.default:
        return tensor
    source = tensor.args[0]
    assert isinstance(source, fx.Node)
    return source


def shape_and_dtype(tensor: torch.Tensor, sizes: Sizes) -> tuple[list[Size], str]:
    """Return how compiled code holds a tensor: complex numbers are pairs along a last axis."""
    shape = list(sizes(tensor))
    if tensor.dtype in PARTS:
        return [*shape, 2], dtype_name(PARTS[tensor.dtype])
    return shape, dtype_name(tensor.dtype)


# ------------------------------------------------------------------------- TorchScript's notation


class _Graph:
    """A graph that takes tensors (and perhaps unused ones) and sizes, and calls an operator.

    Parameters
    ----------
    node
        The call.
    tensors
        Its tensors.
    inputs
        How many the graph takes.
    results
        Shape and dtype of those that it returns, by their index.
    shape_of
        Returns the shape of a tensor.

    Attributes
    ----------
    sizes
        What it takes besides: sizes that vary, and those of results.
    """

    def __init__(
        self,
        node: fx.Node,
        tensors: list[fx.Node],
        inputs: int,
        results: Mapping[int, tuple[list[Size], str]],
        shape_of: Sizes,
    ) -> None:
        graph = self._graph = torch._C.Graph()
        self.sizes: list[Any] = []
        given = [graph.addInput(f"x{i}") for i in range(inputs)]
        known = {}
        for value, tensor in zip(given, tensors, strict=False):
            is_pair = tensor.meta["val"].dtype in PARTS
            known[tensor] = insert(graph, "aten::view_as_complex", [value])[0] if is_pair else value
            if _source(tensor) is not tensor:
                shape = self._numbers(list(shape_of(tensor.meta["val"])))
                expanded = [known[tensor], shape, graph.insertConstant(False)]
                known[tensor] = insert(graph, "aten::expand", expanded)[0]
            elif operators.is_random(node) or node.target is operators.REPLAYED:
                known[tensor] = _as_in_eager(graph, known[tensor], tensor.meta["val"])
        schema = operators.schema(node)
        arguments = operators.arguments(node)
        returned = _leaves(node.meta["val"])
        written = Written.of(node)
        copies = [
            insert(graph, "aten::clone", [known[base], graph.insertConstant(None)])[0]
            for base in written.bases
        ]
        before = None
        if node.target is operators.REPLAYED:
            (before,) = insert(graph, "tvmify::rng_state", [graph.insertConstant(None)])
            insert(graph, "tvmify::set_rng_state", [known[node.args[0]]], 0)
        values = insert(
            graph,
            schema.name,
            [
                self._view(copies, written.views[a.name])
                if a.name in written.views
                else self._argument(known, a, arguments[a.name], returned[0])
                for a in schema.arguments
            ],
            1 if (is_list := _returns_list(schema)) else len(schema.returns),
        )
        if before is not None:
            insert(graph, "tvmify::set_rng_state", [before], 0)
        if is_list:
            values[0].setType(torch._C.ListType.ofTensors())
            values = insert(graph, "prim::ListUnpack", values, len(returned))
        values = [*values, *copies] if values else [None, *copies]  # as PyTorch numbers them
        for i, (shape, dtype) in results.items():
            result = values[i]
            if returned[i].dtype in PARTS:
                (resolved,) = insert(graph, "aten::resolve_conj", [result])
                (result,) = insert(graph, "aten::view_as_real", [resolved])
            self.sizes += (size for size in shape if not is_static(size))
            set_type(result, shape, dtype)
            graph.registerOutput(result)

    def __str__(self) -> str:
        # TorchScript cannot read what it writes for a call without results
        return str(self._graph).replace("\n   = ", "\n  ")

    def _argument(
        self, known: dict[fx.Node, Any], argument: Any, given: Any, first: torch.Tensor
    ) -> Any:
        graph, kind = self._graph, str(argument.type)
        if kind == "Tensor" and isinstance(given, (int, float, complex)):
            return _number_tensor(graph, given, first.dtype)
        if any(isinstance(x, tvm.ir.Expr) for x in pytree.tree_leaves(given)):
            return self._numbers(given)
        return _argument(graph, known, kind, given)

    def _view(self, copies: list[Any], view: Any) -> Any:
        """Return what an operator writes to: a copy, a view of one, or a list of these."""
        if view is None:
            return self._graph.insertConstant(None)
        if isinstance(view, list):
            (made,) = insert(
                self._graph, "prim::ListConstruct", [self._view(copies, each) for each in view]
            )
            made.setType(torch._C.ListType.ofTensors())
            return made
        base = copies[view.base_index]
        if isinstance(view, AsStridedViewInfo):
            numbers = (list(view.size), list(view.stride), view.storage_offset)
            return insert(self._graph, "aten::as_strided", [base, *map(self._numbers, numbers)])[0]
        if isinstance(view, SliceViewInfo):
            numbers = (view.dim, view.start, view.end, 1)
            return insert(self._graph, "aten::slice", [base, *map(self._numbers, numbers)])[0]
        return base

    def _numbers(self, given: Any) -> Any:
        """Return the value of an integer, or of a list of them; any may be a size that varies."""
        graph = self._graph
        if isinstance(given, tvm.ir.Expr):
            return self._size(given)
        if not isinstance(given, (list, tuple)):
            return graph.insertConstant(given)
        (made,) = insert(graph, "prim::ListConstruct", [self._numbers(x) for x in given])
        made.setType(torch._C.ListType.ofInts())
        return made

    def _size(self, size: Any) -> Any:
        value = self._graph.addInput(f"s{len(self.sizes)}")
        value.setType(torch._C.IntType.get())
        self.sizes.append(size)
        return value


def _as_in_eager(graph: Any, value: Any, tensor: torch.Tensor) -> Any:
    """Return a tensor whose elements lie in memory as in eager: numbers are drawn in that order."""
    order = memory_order(tensor)
    if order is None:
        return value
    (value,) = insert(graph, "aten::permute", [value, graph.insertConstant(order)])
    (value,) = insert(graph, "aten::contiguous", [value, graph.insertConstant(0)])
    return insert(graph, "aten::permute", [value, graph.insertConstant(inverse(order))])[0]


def _returns_list(schema: Any) -> bool:
    return [str(returned.type) for returned in schema.returns] == ["List[Tensor]"]


def set_type(result: Any, shape: Sequence[Size], dtype: str) -> None:
    """Give a value of a graph its type; sizes that vary are unknown in it."""
    result.inferTypeFrom(example([x if is_static(x) else 2 for x in shape], dtype))
    if not all(map(is_static, shape)):
        written = ", ".join(str(x) if is_static(x) else "*" for x in shape)
        text = f"graph(%x : {result.type().scalarType()}({written})):\n  return (%x)"
        result.setType(next(torch._C.parse_ir(text).outputs()).type())


def example(shape: list[Any], dtype: str) -> torch.Tensor:
    """Return a tiny tensor from which a value of a graph takes its type."""
    return torch.empty((), dtype=getattr(torch, dtype)).expand(shape)


def _number_tensor(graph: Any, number: complex, dtype: torch.dtype) -> Any:
    """Return a tensor for a number where the operator takes a tensor."""
    device = torch.device("cuda") if is_for_gpu() else None
    given = [graph.insertConstant(v) for v in (dtype, None, device, None)]
    values = [_argument(graph, {}, "number", number), *given]
    return insert(graph, "aten::scalar_tensor", values)[0]


def _argument(graph: Any, known: dict[fx.Node, Any], kind: str, value: Any) -> Any:
    """Return the value of an argument in the graph: a tensor, a list of them, or a constant."""
    if isinstance(value, fx.Node):
        return known[value]
    if isinstance(value, (list, tuple)) and "Tensor" in kind:
        items = [graph.insertConstant(None) if v is None else known[v] for v in value]
        (made,) = insert(graph, "prim::ListConstruct", items)
        tensor = torch._C.TensorType.get()
        item = torch._C.OptionalType(tensor) if "Optional" in kind else tensor
        made.setType(torch._C.ListType(item))
        return made
    if isinstance(value, (torch.memory_format, torch.layout)):
        value = None  # results are made contiguous anyway
    if "Device" in kind and is_for_gpu() and (value is not None or not known):
        value = torch.device("cuda")  # the device of the call, wherever the program was recorded
    if "float" in kind:
        value = pytree.tree_map_only(int, float, value)
    if isinstance(value, complex):  # TorchScript cannot read the constant that it writes
        parts = [graph.insertConstant(part) for part in (value.real, value.imag)]
        (number,) = insert(graph, "aten::Complex", parts)
        number.setType(torch._C.ComplexType.get())
        return number
    if not isinstance(value, (list, tuple)):
        return graph.insertConstant(value)
    if value and isinstance(value[0], bool):  # which constants in the graph cannot express
        (flags,) = insert(graph, "prim::ListConstruct", [graph.insertConstant(v) for v in value])
        flags.setType(torch._C.ListType.ofBools())
        return flags
    if value:
        return graph.insertConstant(list(value))  # lists of a program have another class
    (empty,) = insert(graph, "prim::ListConstruct", [])
    empty.setType(torch._C.ListType.ofInts())
    return empty


def insert(graph: Any, kind: str, inputs: list[Any], outputs: int = 1) -> list[Any]:
    """Add a node to a graph, and return its results."""
    node = graph.create(kind, inputs, outputs)
    graph.insertNode(node)
    return list(node.outputs())
