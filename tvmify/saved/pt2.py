"""``tvmify.export``: a compiled module as a ``torch.export`` program, and as a ``.pt2`` file.

The graph of the program calls one operator, ``tvmify::execute``, with

- the library and the original program, as two constants of bytes; the original is a second
  ``torch.export`` program, which runs where the library cannot;
- the weights: parameters and buffers of the program, under their own names, stored once;
- the inputs.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tvmify.artifact import Artifact
from tvmify.artifact.objects import holds_objects
from tvmify.artifact.results import Computed, View, computed_count, hidden, materialize
from tvmify.artifact.structure import structure_of
from tvmify.capture import Program, capture
from tvmify.capture.carrier import Carrier
from tvmify.decorate.decorated import example_calls, is_decorated, saved_method
from tvmify.decorate.decorator import is_exported, tvmify
from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.errors import SaveError
from tvmify.options import check_path
from tvmify.runtime import compiled_module, embedded
from tvmify.saved.effects import refuse_effects
from tvmify.saved.exported import exported_call
from tvmify.signature import Args, Kwargs, TensorSpec
from tvmify.system.replacing import replacing
from tvmify.target import TargetOption
from tvmify.torch_compat.memory import check_saved
from tvmify.torch_compat.tracing import tracing

if TYPE_CHECKING:
    from torch.export import ExportedProgram

#: Node metadata that is larger than the program, and not needed to run it.
_ABOUT_SOURCES = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "torch_fn")


def export(
    model: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    example_inputs: Any = None,
    signature: Any = None,
    target: TargetOption = None,
    strict: bool = False,
) -> ExportedProgram:
    """Return a compiled model as a ``torch.export`` program, and write it to a ``.pt2`` file.

    ``torch.export.load`` reads the file in a process that has imported ``tvmify``, without the
    compiler. Where the code cannot run (a CPU without the instruction sets, another version of
    TVM's runtime, weights of another dtype), the original runs in PyTorch instead, and a warning
    says why.

    Parameters
    ----------
    model
        A decorated module or function, or a plain one, in evaluation mode; or another
        ``torch.export.ExportedProgram``. It is not changed.
    path
        Path of the file; None writes no file. An existing file is replaced once the new one is
        complete.
    example_inputs
        Arguments of a call: a tensor, a tuple of positional arguments, or a dict of keyword
        arguments.
    signature
        The same, in a form that ``warmup`` takes, such as ``[(1, 3, 224, 224)]``. Without either,
        the only signature that the model was called with or exported for.
    target
        What to build for, like the option ``target``; None for the model's own target.
    strict
        Raise an error where the original would run.

    Returns
    -------
    ExportedProgram
        ``.module()`` calls it, with the weights of the model, which are not copied. Shapes are
        static: ``torch.export``'s guards refuse others. Results of calls are contiguous, and share
        no memory with arguments.

    Raises
    ------
    SaveError
        No example is given, and the model was not called with exactly one signature.
    NotCompiled
        The model cannot be compiled for such a call.

    Examples
    --------
    >>> program = tvmify.export(model, "model.pt2", signature=[(1, 3, 224, 224)])
    >>> torch.export.load("model.pt2").module()(image)
    """
    if path is not None:
        check_path(path, "export(model, path)")
    if inspect.isclass(model):
        raise TypeError(f"export an instance of {model.__name__}, not the class")
    subject = model if is_decorated(model) else tvmify(model)
    dispatcher = saved_method(subject)
    with torch.inference_mode(False), torch.no_grad():
        example = example_inputs if signature is None else signature
        if example is None:
            args, kwargs = exported_call(model) if is_exported(model) else _only_call(dispatcher)
        else:
            args, kwargs = _call(dispatcher, example, shapes=signature is not None)
        # Fresh zeros: examples are stored in the file, and must be distinct tensors.
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: TensorSpec.of(tensor).example(), (args, kwargs)
        )
        artifact = dispatcher.compiled(args, kwargs, target)
        refuse_effects(dispatcher.subject.name, artifact, "exported")
        _check_results(dispatcher.subject.name, artifact)
        program = capture(dispatcher.subject.captured(), args, kwargs)
        module = _exportable(subject, artifact, program, args, kwargs, strict)
        exported = _record(module, args, kwargs)
        if path is not None:
            with replacing(Path(path)) as file:
                torch.export.save(exported, file)
    return exported


def _check_results(name: str, artifact: Artifact) -> None:
    if hidden(artifact.outputs):
        raise SaveError(
            f"{name} cannot be exported: forward returns views of one tensor that is not "
            "contiguous, and results of an exported program share no memory. Call .clone() on them"
        )


def _call(dispatcher: Dispatcher, signature: Any, *, shapes: bool) -> tuple[Args, Kwargs]:
    first, *_ = example_calls(dispatcher, signature, shapes=shapes)
    if first.declared:
        raise SaveError(
            "an exported program is for one shape: give a number in place of each Dim in "
            f"{signature}"
        )
    return first.args, first.kwargs


def _only_call(dispatcher: Dispatcher) -> tuple[Args, Kwargs]:
    calls = dispatcher.examples()
    if len(calls) != 1:
        raise SaveError(
            f"{dispatcher.subject.name} runs compiled for {len(calls)} signatures so far, but an "
            "exported program is for one: give example_inputs, or signature"
        )
    return calls[0]


def _record(module: nn.Module, args: Args, kwargs: Kwargs) -> ExportedProgram:
    # Imported here because a process that only runs compiled code does not need it.
    from tvmify.capture.exporting import quiet
    from tvmify.torch_compat.bystanders import unseen_by_others

    with tracing(beside_others=True), unseen_by_others(), quiet():
        return torch.export.export(module, args, kwargs, strict=False)


def _exportable(
    subject: Any, artifact: Artifact, program: Program, args: Args, kwargs: Kwargs, strict: bool
) -> nn.Module:
    """Return a module with the state of the decorated one, whose forward calls the operator."""
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    module = Carrier()
    names = _carry_state(module, subject, program)
    code, library = _code(artifact)
    original = _original(artifact, program, args, kwargs)
    data = _bytes_of(original)
    module.tvmify_library, module.tvmify_original = library, _tensor_of(data)
    facts = code | {
        "inputs": embedded.kinds(leaves[i] for i in tensors),
        "weights": embedded.kinds(module.carried(name) for name in names),
        "outputs": embedded.kinds(_results(original)),
        "reads": _listed(tensors.index(i) for i in artifact.inputs),
        "packs": _listed(program.weights.index(name) for name in artifact.weights),
        "original": embedded.digest(data),
    }
    as_strided = torch.ops.aten.as_strided.default
    reads_memory = bool(original.graph.find_nodes(op="call_function", target=as_strided))
    marks = {"strides": artifact.draws_in_order or reads_memory, "strict": strict}
    facts |= {name: True for name, mark in marks.items() if mark}
    description = embedded.description(facts)
    structure = structure_of(artifact.output_structure)
    if holds_objects(structure):
        raise SaveError(
            "the result contains objects of classes that an exported program cannot store: "
            "return tuples, lists or dicts of tensors"
        )

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        results = torch.ops.tvmify.execute(
            module.tvmify_library,
            module.tvmify_original,
            description,
            [module.carried(name) for name in names],
            [leaves[i] for i in tensors],
        )
        made = materialize(artifact.outputs, results, leaves, view=_view)
        return pytree.tree_unflatten(made, structure)

    forward.__signature__ = _signature(subject)  # type: ignore[attr-defined]  # of names
    module.forward = forward
    return module


def _view(view: View, whole: torch.Tensor) -> torch.Tensor:
    if view.argument is not None:  # it may not be contiguous
        whole = whole.clone(memory_format=torch.contiguous_format)
    return view.within(whole)


def _listed(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def _signature(subject: Any) -> inspect.Signature:
    """Return the parameters of a forward, after which ``torch.export`` names the inputs."""
    forward = subject.forward if isinstance(subject, nn.Module) else subject
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):  # a scripted function has none
        return inspect.signature(lambda *args, **kwargs: None)


def _carry_state(module: Carrier, subject: Any, program: Program) -> list[str]:
    """Copy the state of a module to another; return the names of the program's weights there.

    A weight in the state dict keeps its name, so that ``load_state_dict`` finds it.
    """
    state = subject.state_dict(keep_vars=True) if isinstance(subject, nn.Module) else {}
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    check_saved(tensors)
    first_name: dict[int, str] = {}
    for name, tensor in tensors.items():
        module.carry(name, tensor)
        first_name.setdefault(id(tensor), name)
    names = []
    for name, tensor in zip(program.weights, program.tensors(), strict=True):
        if id(tensor) not in first_name:
            module.carry(name, tensor, persistent=False)
        names.append(first_name.setdefault(id(tensor), name))
    return names


def _code(artifact: Artifact) -> tuple[dict[str, object], torch.Tensor]:
    """Return the manifest of a library, and its bytes."""
    version, texts, library = compiled_module(artifact).__getstate__()[0]
    facts = {name: text for name, text in texts.items() if name != "metadata"}
    return {"code": version} | facts, library


class _Original(Carrier):
    """The compiled program as a function of two lists of tensors: weights and inputs."""

    def __init__(self, artifact: Artifact, program: Program, args: Args, kwargs: Kwargs) -> None:
        super().__init__()
        exported = program.export(args, kwargs)
        self._graph = exported.graph_module  # takes weights and inputs as separate arguments
        self._specs = exported.graph_signature.input_specs
        self._weights = program.weights
        self._leaves = pytree.tree_leaves((args, kwargs))
        self._literals = list(exported.constants)
        for name, literal in exported.constants.items():
            assert isinstance(literal, torch.Tensor)
            self.carry(name, literal, persistent=False)
        # Positions of the tensors that the operator returns.
        count = computed_count(artifact.outputs)
        self._places = [artifact.outputs.index(Computed(i)) for i in range(count)]

    def forward(
        self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        remaining = iter(inputs)
        leaves = iter(
            next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves
        )
        named = {name: self.carried(name) for name in self._literals}
        named |= zip(self._weights, weights, strict=True)
        arguments = (
            next(leaves) if spec.target is None else named.get(spec.target) for spec in self._specs
        )
        results = self._graph(*arguments)
        return [results[i] for i in self._places]


def _original(artifact: Artifact, program: Program, args: Args, kwargs: Kwargs) -> ExportedProgram:
    weights = [torch.empty_like(tensor) for tensor in program.tensors()]
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    exported = _record(_Original(artifact, program, args, kwargs), (weights, inputs), {})
    exported.example_inputs = None  # they hold the weights, which would be stored twice
    for node in exported.graph.nodes:
        for name in _ABOUT_SOURCES:
            node.meta.pop(name, None)
    return exported


def _results(program: ExportedProgram) -> list[torch.Tensor]:
    """Return empty tensors with the shapes and dtypes of the program's results."""
    nodes: Any = program.graph.output_node().args[0]
    return [node.meta["val"] for node in nodes]


def _bytes_of(program: ExportedProgram) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def _tensor_of(data: bytes) -> torch.Tensor:
    # frombuffer needs writable memory
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
