"""Programs of modules that cannot be scripted: recorded by ``torch.export`` for one signature."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from tvmify.artifact.objects import describe_objects, reachable
from tvmify.capture.draws import may_draw
from tvmify.capture.exported.fingerprint import fingerprint, operators_of
from tvmify.capture.exported.recorded_call import RecordedCall
from tvmify.capture.exporting import FunctionModule, NoRealWrites, export, has_symbols
from tvmify.capture.nested import avoid_nested_tensors, refuse_nested_tensors
from tvmify.capture.program import Program
from tvmify.capture.questions import asks_for_identity, asks_for_layout
from tvmify.capture.recorded import RecordedGraph
from tvmify.capture.side_effects import refusing_effects
from tvmify.capture.state import resolve, tensor_names
from tvmify.capture.twin import changed_attribute, make_buffers, twin
from tvmify.capture.varying import STATIC, Varying, shapes_of
from tvmify.capture.weights import name_attributes, names_of, with_weights
from tvmify.errors import (
    SET_ATTRIBUTE,
    NotCompiled,
    UnsupportedInput,
    UnsupportedOperator,
)
from tvmify.signature import repetitions
from tvmify.torch_compat.known_buffers import known_buffers
from tvmify.torch_compat.tracing import tracing


class TracedProgram(Program):
    """A module or function that ``torch.export`` understands, for one signature.

    Parameters
    ----------
    callable_
        The plain module or function.
    args, kwargs
        Example arguments of the signature to record.
    reason
        Why it could not be scripted.
    varying
        Sizes that are symbols in the program.

    Raises
    ------
    CaptureError
        ``torch.export`` cannot record it either.
    UnsupportedOperator
        Its forward sets an attribute.
    """

    method = "export"

    def __init__(
        self,
        callable_: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reason: str,
        varying: Varying = STATIC,
    ) -> None:
        self.reason = reason
        self._varying = varying.recorded()
        self._owner = callable_
        self.asks_for_identity = asks_for_identity(callable_)
        names = names_of(callable_)
        exported = self._exported(args, kwargs, varying)
        self.constants = tuple(name_attributes(exported, names))
        self.is_general = has_symbols(exported)
        if not self.is_general:
            self._varying = STATIC  # it is the program of this very call
        self._call = self._call_key(args, kwargs)
        placeholders = exported.graph.find_nodes(op="placeholder")
        used = {node.name for node in placeholders if node.users}
        self.weights = tuple(
            spec.target
            for spec in exported.graph_signature.input_specs
            if spec.target in exported.state_dict and spec.arg.name in used
        )
        self.fingerprint = fingerprint(exported, self.weights)
        self._names = tuple(exported.state_dict)
        self._recorded = with_weights(exported, {})
        self.may_draw = may_draw(callable_, operators_of(exported))
        self.asks_for_layout = asks_for_layout(callable_)

    def _exported(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], varying: Varying
    ) -> ExportedProgram:
        """Record the program, and set `read`, also in an error."""
        callable_, read = self._owner, set[str]()
        call = RecordedCall(args, kwargs, self._repetitions(args, kwargs), varying)
        if isinstance(callable_, torch.nn.Module):
            module, watch = _copied(callable_, call.has_numbers), partial(_watched, callable_, read)
        else:
            module, watch = FunctionModule(callable_), _unwatched
        module.register_forward_hook(partial(_describe_objects, [callable_, args, kwargs]))
        call.attach(module, watch)
        try:
            with tracing(), refusing_effects(callable_, module):
                return export(module, call.args, call.kwargs, varying)
        except NotCompiled as error:
            error.read = tuple(sorted(read))
            raise
        finally:
            self.read = tuple(sorted(read))

    def _repetitions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int]:
        return repetitions((args, kwargs)) if self.asks_for_identity else {}

    def accepts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these arguments have the recorded signature; a symbol matches any size."""
        return self._call_key(args, kwargs) == self._call

    def export(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], varying: Varying = STATIC
    ) -> ExportedProgram:
        """Return the recorded program, with the current tensors of the module."""
        if varying.recorded() != self._varying or not self.accepts(args, kwargs):
            raise UnsupportedInput(
                "the program was recorded for arguments of other shapes or values",
                "Capture the module again with these arguments.",
            )
        return with_weights(self._recorded, {n: resolve(self._owner, n) for n in self._names})

    def _call_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        return structure, shapes_of(leaves, self._varying), self._repetitions(args, kwargs)

    def tensors(self) -> list[torch.Tensor]:
        """Return the current tensors of the module."""
        return [resolve(self._owner, name) for name in self.weights]


def _copied(module: torch.nn.Module, takes_numbers: bool) -> torch.nn.Module:
    """Return a twin of a module that can be recorded."""
    copied = twin(module)
    if isinstance(module, fx.GraphModule) and (
        takes_numbers or not isinstance(module, RecordedGraph)
    ):
        copied.__class__ = _by_nodes(type(module))
    for part in copied.modules():
        make_buffers(part)  # otherwise recording would write to them
    avoid_nested_tensors(copied)
    refuse_nested_tensors(copied)
    return copied


def _by_nodes(cls: type[fx.GraphModule]) -> type[torch.nn.Module]:
    """Return a class that runs the graph of a module node by node, as ``torch.export`` does, which
    would do so without calling forward, and with it what surrounds a recorded call.
    """

    @functools.wraps(cls.forward)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        with preserve_node_meta():
            return fx.Interpreter(module, graph=module._graph).run(*args, *kwargs.values())

    return type(cls.__name__, (torch.nn.Module,), {"forward": forward})


def _watched(
    original: torch.nn.Module, read: set[str], module: torch.nn.Module, run: Callable[[], Any]
) -> Any:
    """Refuse what a recorded forward must not do. Checked inside the call, since ``torch.export``
    restores the attributes afterwards.
    """
    buffers = dict(module.named_buffers())
    # a graph of Dynamo's is shared by modules whose buffers may differ
    known = {} if isinstance(original, RecordedGraph) else dict(tensor_names(original))
    with NoRealWrites(), known_buffers(buffers, known, read):
        result = run()
    _refuse_changes(original, module, buffers)
    return result


def _unwatched(_: torch.nn.Module, run: Callable[[], Any]) -> Any:
    return run()


def _refuse_changes(
    original: torch.nn.Module, module: torch.nn.Module, buffers: dict[str, Any]
) -> None:
    name = changed_attribute(module, original)
    for other, buffer in module.named_buffers():
        # one in its place, which torch.export would take for a write to it
        if name is None and buffers[other] is not buffer:
            name = other
    if name is not None:
        raise UnsupportedOperator([SET_ATTRIBUTE], f"forward sets the attribute {name}")


def _describe_objects(before: list[Any], module: torch.nn.Module, _: Any, result: Any) -> Any:
    return describe_objects(result, lambda: reachable([*before, module]))
