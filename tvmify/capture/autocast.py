"""Autocast written into programs as explicit casts.

``torch.export`` records operators above autocast. The dtypes it records are right, but the casts
are missing, and regions with other settings are separate graphs (``wrap_with_autocast``).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tvmify.errors import CaptureError

_REGION = torch.ops.higher_order.wrap_with_autocast
_GRAD_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
#: The casts that autocast puts before an operator; inference mode records them directly.
_CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)


class _Setting(NamedTuple):
    """The autocast setting for the device of a program."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def present(cls, device: str) -> _Setting:
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def off(self) -> _Setting:
        return _Setting(self.device, False, self.dtype)

    def context(self) -> torch.autocast:
        # Without the cache, which would hide the second cast of a weight.
        return torch.autocast(self.device, self.dtype, self.enabled, cache_enabled=False)


@contextlib.contextmanager
def separate_autocast() -> Iterator[None]:
    """Keep casts of fake tensors out of autocast's cache, which eager calls read; and close the
    regions that a graph has entered by a function before it raised an exception.
    """
    is_cached, nesting = torch.is_autocast_cache_enabled(), _nesting()
    settings = [_Setting.present(device) for device in ("cpu", "cuda")]
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        for setting in settings:
            torch.set_autocast_enabled(setting.device, setting.enabled)
            torch.set_autocast_dtype(setting.device, setting.dtype)
        for _ in range(nesting, _nesting()):
            torch.autocast_decrement_nesting()
        torch.set_autocast_cache_enabled(is_cached)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def insert_casts(program: ExportedProgram) -> None:
    """Write the casts of the current autocast setting into a program recorded under it. Regions
    with other settings or grad modes are replaced by their operators.

    Raises
    ------
    CaptureError
        Under autocast, an operator does more than cast its arguments.
    """
    settings = _inline_regions(program.graph_module, _Setting.present(_device_of(program)))
    if any(setting.enabled for setting in settings.values()):
        casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        for node, setting in settings.items():
            if setting.enabled and isinstance(node.target, torch._ops.OpOverload):
                _write_casts(program.graph, node, setting, casts)
    program.graph_module.recompile()


def _device_of(program: ExportedProgram) -> str:
    """Return the device type that a program computes on, which autocast supports."""
    values = (node.meta.get("val") for node in program.graph.find_nodes(op="placeholder"))
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
    return "cuda" if on_gpu else "cpu"


# ------------------------------------------------------------------------------------- regions


def _inline_regions(graph_module: fx.GraphModule, present: _Setting) -> dict[fx.Node, _Setting]:
    """Replace all regions, and return the setting that each operator ran under."""
    settings: dict[fx.Node, _Setting] = {}
    # Each operator with the module that its regions are attributes of.
    todo = [(node, present, graph_module) for node in graph_module.graph.nodes]
    while todo:
        node, setting, owner = todo.pop(0)
        if node.op != "call_function" or node._erased:
            continue
        if node.target not in (_REGION, _GRAD_REGION):
            settings[node] = setting
            continue
        arguments: Any = node.args
        if node.target is _GRAD_REGION:  # of torch.no_grad(): the results are the same
            _, body, *operands = arguments
        else:
            device, dtype, enabled, _, body, *operands = arguments
            if device == present.device:
                dtype = dtype or torch.get_autocast_dtype(device)
                setting = _Setting(device, bool(enabled), dtype)
        region = getattr(owner, body.target)
        inlined = _inline(graph_module.graph, node, region.graph, operands)
        graph_module.graph.erase_node(body)
        todo = [(inner, setting, region) for inner in inlined] + todo
    return settings


def _inline(graph: fx.Graph, node: fx.Node, body: fx.Graph, operands: Any) -> list[fx.Node]:
    """Replace a node by a graph; the node returns one result, or several as a tuple."""
    placeholders = body.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = dict(zip(placeholders, operands, strict=True))
    inlined = []
    with graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op not in ("placeholder", "output"):
                values[inner] = graph.node_copy(inner, values.__getitem__)
                inlined.append(values[inner])
    result: Any = fx.map_arg(body.output_node().args[0], values.__getitem__)
    for user in list(node.users):
        if user.target is operator.getitem and isinstance(result, (tuple, list)):
            index: Any = user.args[1]
            user.replace_all_uses_with(result[index])
            graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(result)  # type: ignore[arg-type]
    graph.erase_node(node)
    return inlined


# --------------------------------------------------------------------------------------- casts


class _OtherCallError(Exception):
    """An unexpected operator ran."""


class _Log(TorchDispatchMode):
    """Records which operators run below autocast, and which arguments are cast first. Raises
    `_OtherCallError` before an operator other than the expected ones, if any, runs: PyTorch would
    print a traceback for a product of two dtypes, which only autocast allows.
    """

    def __init__(self, arguments: Collection[Any], expected: list[str] | None = None) -> None:
        super().__init__()
        self.expected = expected
        self.arguments = {id(leaf) for leaf in pytree.tree_leaves(list(arguments))}
        self.calls: list[str] = []
        self.casts: list[tuple[torch.Tensor, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "aten":
            return func(*args, **(kwargs or {}))
        tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        turn = len(self.calls)
        self.calls.append(f"{func}{[(t.dtype, tuple(t.shape)) for t in tensors]}")
        if self.expected is not None and self.calls[turn:] != self.expected[turn : turn + 1]:
            raise _OtherCallError
        result = func(*args, **(kwargs or {}))
        is_first = len(self.casts) == turn
        if func in _CASTS and is_first and id(tensors[0]) in self.arguments:
            self.casts.append((tensors[0], result.dtype))
        return result


def _run(
    call: _Call, values: dict[fx.Node, Any], setting: _Setting, expected: list[str] | None = None
) -> _Log:
    with setting.context(), _Log(values.values(), expected) as log:
        call(values)
    return log


def _write_casts(
    graph: fx.Graph,
    node: fx.Node,
    setting: _Setting,
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node],
) -> None:
    values = {argument: argument.meta["val"] for argument in node.all_input_nodes}
    mode = _fake_mode(values.values())
    if mode is None:
        return  # it creates a tensor, and autocast casts only existing ones
    call = _Call(node)
    with mode, torch.inference_mode(False), torch.no_grad():
        with_casts = _run(call, values, setting)
        if _does(call, values, setting, with_casts.calls):
            return
        if not _has_policy(node.target, setting):
            _replace_by_parts(graph, node, call, values, setting)
            return
        wanted = _casts_of_arguments(node, call, values, setting, with_casts)
        for argument, value in values.items():
            if (dtype := wanted.get(id(value))) is not None:
                node.replace_input_with(argument, _cast(graph, node, argument, dtype, casts))


def _casts_of_arguments(
    node: fx.Node,
    call: _Call,
    values: dict[fx.Node, Any],
    setting: _Setting,
    with_casts: _Log,
) -> dict[int, torch.dtype]:
    """Return the dtype that each argument is cast to, by the identity of its value.

    Raises
    ------
    CaptureError
        Autocast does more than that.
    """
    # The last casts may be the operator's own.
    for count in range(len(with_casts.casts), 0, -1):
        wanted = {id(tensor): dtype for tensor, dtype in with_casts.casts[:count]}
        cast_values = {n: v.to(wanted.get(id(v), v.dtype)) for n, v in values.items()}
        if _does(call, cast_values, setting, with_casts.calls[count:]):
            return wanted
    raise CaptureError(
        f"under autocast, {node.target} does more than cast its arguments",
        "Leave torch.autocast around it, or convert the module with .to(dtype).",
    )


def _does(call: _Call, values: dict[fx.Node, Any], setting: _Setting, calls: list[str]) -> bool:
    """Whether a call runs exactly these operators without autocast."""
    try:
        return _run(call, values, setting.off(), calls).calls == calls
    except (_OtherCallError, RuntimeError):
        return False  # its own checks failed, for example since two dtypes differ


class _Call:
    """Calls the function of a node, with other values."""

    def __init__(self, node: fx.Node) -> None:
        self._target: Any = node.target
        self._arguments = node.args, node.kwargs

    def __call__(self, values: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.map_arg(self._arguments, values.__getitem__)
        return self._target(*args, **kwargs)


def _has_policy(target: Any, setting: _Setting) -> bool:
    """Whether autocast casts the arguments of this operator itself, not of operators inside it."""
    key = f"Autocast{setting.device.upper()}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)


def _fake_mode(values: Any) -> FakeTensorMode | None:
    tensors = (leaf for leaf in pytree.tree_leaves(list(values)))
    return next((t.fake_mode for t in tensors if hasattr(t, "fake_mode")), None)


def _cast(
    graph: fx.Graph,
    node: fx.Node,
    argument: fx.Node,
    dtype: torch.dtype,
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node],
) -> fx.Node:
    # Only computed values may be written to between two casts, not inputs and weights.
    known = casts.get((argument, dtype)) if argument.op == "placeholder" else None
    if known is not None:
        return known
    with graph.inserting_before(node):
        cast = graph.call_function(torch.ops.aten.to.dtype, (argument, dtype))
    cast.meta["val"] = argument.meta["val"].to(dtype)
    casts[argument, dtype] = cast
    return cast


def _replace_by_parts(
    graph: fx.Graph,
    node: fx.Node,
    call: _Call,
    values: dict[fx.Node, Any],
    setting: _Setting,
) -> None:
    """Replace a composite operator by the operators inside it, with the casts between them."""
    names = list(values)
    with setting.context():
        traced = make_fx(lambda *tensors: call(dict(zip(names, tensors, strict=True))))(
            *values.values()
        )
    _inline(graph, node, traced.graph, names)
