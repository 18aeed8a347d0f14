"""Operators that PyTorch computes, called from inside the compiled program. An operator whose
converter is missing or gives up becomes a call of ``tvmify.aten`` (in ``native/aten_bridge.cpp``),
with the operator and its constant arguments as a small TorchScript graph. Tensors are passed
without a copy; results come from PyTorch's allocator.

TVM has no complex numbers: between such calls they are real tensors with an additional axis of size
two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import tvm
from torch import fx
from torch.utils import _pytree as pytree
from tvm import relax

from tvmify.artifact import CALL_OF_TORCH
from tvmify.compiler.aten import operators
from tvmify.compiler.backend import is_for_gpu
from tvmify.torch_compat.symbols import is_symbolic

#: Complex dtypes and the dtypes of their parts.
PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def can_bridge(node: fx.Node, dtypes: frozenset[str]) -> bool:
    """Whether PyTorch can compute a call: all results are tensors of known shapes and dtypes.

    Parameters
    ----------
    node
        A call of an operator.
    dtypes
        Names of the dtypes that compiled code can hold.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if operators.EMPTY in node.meta:  # its arguments are incomplete
        return False
    if target is torch.ops.aten.view.dtype:  # TorchScript mistakes the dtype for a size
        return False
    values = _leaves(node.meta.get("val"))
    results = [values[i] for i in _used(node, len(values))]
    if any(isinstance(x, tvm.ir.Expr) for x in pytree.tree_leaves((node.args, dict(node.kwargs)))):
        return False  # the graph can only hold constants
    return bool(results) and all(
        isinstance(tensor, torch.Tensor)
        and not is_symbolic(tensor)
        and tensor.layout is torch.strided
        and (tensor.dtype in PARTS or str(tensor.dtype).removeprefix("torch.") in dtypes)
        for tensor in results + [n.meta["val"] for n in _tensor_nodes(node)]
    )


def is_complex(node: fx.Node) -> bool:
    """Whether a call takes or returns complex numbers."""
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    return any(isinstance(t, torch.Tensor) and t.is_complex() for v in values for t in _leaves(v))


def bridge(
    node: fx.Node, env: dict[fx.Node, Any], emit: Callable[[relax.Expr], Any], after: Any = None
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
    after
        A tensor that must be computed before, if the order matters, as for random operators.

    Returns
    -------
    The Relax value of the result; a tuple if there are several, with None for unused ones.
    """
    nodes = _tensor_nodes(node)
    arguments = [env[n] for n in nodes] + ([] if after is None else [after])
    results = _leaves(node.meta["val"])
    used = _used(node, len(results))
    text = _graph(node, nodes, len(arguments), used)
    types = [relax.TensorType(*_shape_and_dtype(results[i])) for i in used]
    ty = types[0] if len(types) == 1 else relax.TupleType(types)
    call = relax.op.call_pure_packed(
        CALL_OF_TORCH, tvm.ir.StringImm(text), *arguments, ty_args=[ty]
    )
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


def _shape_and_dtype(tensor: torch.Tensor) -> tuple[list[int], str]:
    shape = [int(extent) for extent in tensor.shape]
    if tensor.dtype in PARTS:
        return [*shape, 2], str(PARTS[tensor.dtype]).removeprefix("torch.")
    return shape, str(tensor.dtype).removeprefix("torch.")


# ------------------------------------------------------------------------- TorchScript's notation


def _graph(node: fx.Node, tensors: list[fx.Node], inputs: int, used: list[int]) -> str:
    """Return a graph that takes the tensors (and perhaps unused ones) and calls the operator. It
    returns the results whose indices are in ``used``.
    """
    graph = torch._C.Graph()
    given = [graph.addInput(f"x{i}") for i in range(inputs)]
    known = {}
    for value, tensor in zip(given, tensors, strict=False):
        is_pair = tensor.meta["val"].dtype in PARTS
        known[tensor] = insert(graph, "aten::view_as_complex", [value])[0] if is_pair else value
    schema = operators.schema(node)
    given = operators.arguments(node)
    results = _leaves(node.meta["val"])
    arguments = [
        _number_tensor(graph, given[a.name], results[0].dtype)
        if str(a.type) == "Tensor" and isinstance(given[a.name], (int, float))
        else _argument(graph, known, str(a.type), given[a.name])
        for a in schema.arguments
    ]
    is_list = [str(returned.type) for returned in schema.returns] == ["List[Tensor]"]
    values = insert(graph, schema.name, arguments, 1 if is_list else len(results))
    if is_list:
        values[0].setType(torch._C.ListType.ofTensors())
        values = insert(graph, "prim::ListUnpack", values, len(results))
    for i in used:
        result = value = values[i]
        tensor = results[i]
        if tensor.dtype in PARTS:
            (resolved,) = insert(graph, "aten::resolve_conj", [value])
            (result,) = insert(graph, "aten::view_as_real", [resolved])
        shape, dtype = _shape_and_dtype(tensor)
        result.inferTypeFrom(example(shape, dtype))
        graph.registerOutput(result)
    return str(graph)


def example(shape: list[int], dtype: str) -> torch.Tensor:
    """Return a tiny tensor from which a value of a graph takes its type."""
    return torch.empty((), dtype=getattr(torch, dtype)).expand(shape)


def _number_tensor(graph: Any, number: float, dtype: torch.dtype) -> Any:
    """Return a tensor for a number where the operator takes a tensor."""
    device = torch.device("cuda") if is_for_gpu() else None
    values = [graph.insertConstant(v) for v in (number, dtype, None, device, None)]
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
