"""The TorchScript module in a saved file, whose forward runs the compiled code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tvmify.artifact import Artifact
from tvmify.artifact.objects import holds_objects
from tvmify.artifact.results import computed_count, materialize
from tvmify.artifact.shapes import Shapes
from tvmify.artifact.structure import structure_of
from tvmify.errors import SaveError, UnsupportedOperator
from tvmify.runtime import ORIGINAL, compiled_module, with_method_renamed
from tvmify.saved.result_text import (
    ResultText,
    SizePlace,
    TensorPlace,
    Writer,
    annotation,
    argument_source,
    homes_of,
    plain,
)
from tvmify.target import Target
from tvmify.torch_compat.memory import check_saved

if TYPE_CHECKING:
    from tvmify.capture.scripted.interpretable import Interpretable

#: Positional and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]

# The forward of a saved module. `run` returns the structure of the result, by number, and its
# tensors; or None if no compiled code serves the call.
_FORWARD = """
def forward({parameters}) -> {returns}:
    _found = self._tvmify.run({arguments}, {state})
    if _found is not None:
        _form, _tensors = _found
{results}
{fallback}
"""
# How `run` describes a call, and the module's state.
_PROBE = """
def forward({parameters}) -> Tuple[str, str, List[Tensor], str]:
    _text, _tensors = torch.ops.tvmify.describe({arguments})
    _pattern = torch.ops.tvmify.pattern({arguments})
    return _text, _pattern, _tensors, torch.ops.tvmify.describe({state})[0]
"""


class CompiledCall(NamedTuple):
    """Compiled code for one target, and an example call that it serves."""

    call: Call
    artifact: Artifact


class SavedForm(NamedTuple):
    """The module that a file contains, and its entry in the manifest."""

    module: torch.jit.ScriptModule
    description: dict[str, Any]


def saved_form(
    subject: Callable[..., Any], name: str, programs: Sequence[CompiledCall], strict: bool
) -> SavedForm:
    """Return what a file contains for a module or function.

    Its ``forward`` gets the tensors of the result from ``_tvmify``, a native object. If no compiled
    code serves the call, the original ``forward`` runs, under another name.

    Parameters
    ----------
    subject
        A plain module or function, or its TorchScript. It is not changed.
    name
        The name in the manifest.
    programs
        Of several with the same arguments, a machine uses the first that it can run. A program with
        symbolic sizes serves the calls that no other does; it is saved once, even if it is given
        for several calls. All tensors in an example call must be distinct objects.
    strict
        Whether a call that no program serves is an error.

    Raises
    ------
    SaveError
        TorchScript cannot express the subject, its arguments or its results.
    """
    form, agreed = _interpretable(subject, programs)
    texts = {
        "parameters": ", ".join(["self", *form.parameters]),
        "arguments": _tuple(p.partition(":")[0] for p in form.parameters if p != "*"),
        "state": _tuple(map(_attribute, form.state)),
    }
    probe = _with_forward(form, _PROBE.format(**texts))
    seen = [_Seen.of(program, form, probe) for program in programs]
    results = list(dict.fromkeys(program.result for program in seen))
    if form.returns is None and len(results) > 1:
        raise SaveError(f"{name} returns results of several structures: save each in its own file")

    fallbacks = [s.arguments for s, agrees in zip(seen, agreed, strict=False) if agrees]
    native = torch.classes.tvmify.SavedModule(seen[0].state, fallbacks)
    native.set_strict(strict)
    added = _distinct(seen, programs)
    for program, artifact in added:
        number, code = results.index(program.result), compiled_module(artifact)
        places = (program.inputs, program.weights, list(artifact.packed), program.outputs)
        shapes = program.shapes.to_text() if program.shapes else ""
        native.add(program.served, *places, number, code, shapes, artifact.strides_matter)
    arguments = ", ".join(form.arguments)
    fallback = f"    return self.{ORIGINAL}({arguments})"
    if form.returns is None:
        fallback = f"    _eager = self.{ORIGINAL}({arguments})\n    return {results[0].interpreted}"
    written = _FORWARD.format(
        **texts,
        returns=form.returns or results[0].annotation,
        results=_alternatives(results),
        fallback=fallback,
    )
    module = _with_forward(form, written, native)
    return SavedForm(module, _description(name, module, added))


def _distinct(
    seen: Sequence[_Seen], programs: Sequence[CompiledCall]
) -> list[tuple[_Seen, Artifact]]:
    """Drop programs with symbolic sizes that are there for an earlier call."""
    found: dict[Any, tuple[_Seen, Artifact]] = {}
    for number, (program, (_, artifact)) in enumerate(zip(seen, programs, strict=True)):
        code = program.served, program.shapes, artifact.target, artifact.library
        found.setdefault(number if program.shapes is None else code, (program, artifact))
    return list(found.values())


def _interpretable(
    subject: Callable[..., Any], programs: Sequence[CompiledCall]
) -> tuple[Interpretable, list[bool]]:
    """Return the subject in TorchScript, and the calls for which it can replace compiled code.

    An empty list means all calls, including those without a program.
    """
    # Imported here because it imports torch.export, which a process that only calls does not need.
    from tvmify.capture.scripted.interpretable import agrees, interpretable, traced
    from tvmify.capture.scripted.scripting import CannotScript

    try:
        return interpretable(subject), []
    except (CannotScript, UnsupportedOperator):
        calls = [pytree.tree_map(_with_elements, program.call) for program in programs]
        form = traced(subject, *calls[0])
        weights = (name for program in programs for name in program.artifact.weights)
        form.state = list(dict.fromkeys(weights))
        agreed = [agrees(form, subject, call) for call in calls]
        if not agreed[0]:
            raise SaveError(
                "the module does not compute what torch.jit.trace recorded: change it so "
                "that torch.jit.script can compile it"
            ) from None
        return form, agreed


def _with_elements(leaf: Any) -> Any:
    """Replace an example of zeros by random numbers."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.any():
        return leaf
    generator = torch.Generator().manual_seed(0)
    return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)


def _with_forward(form: Interpretable, source: str, native: Any = None) -> Any:
    """Return a copy of the module with another forward, and ``native`` as its ``_tvmify``."""
    from tvmify.capture.scripted.interpretable import define

    module: Any = with_method_renamed(form.module, "forward", ORIGINAL)
    if native is not None and module.hasattr("_tvmify"):
        module.setattr("_tvmify", native)  # the module was loaded from a saved file
    elif native is not None:
        module._register_attribute("_tvmify", native._type(), native)
    try:
        return define(module, source, form.names | {"torch": torch})
    except (RuntimeError, ValueError) as error:
        raise SaveError(f"TorchScript cannot compile this forward:{source}{error}") from error


class _Seen(NamedTuple):
    """A program in the form that `SavedModule` expects (tvmify/native/saved_module.h).

    Attributes
    ----------
    arguments
        The arguments of the example, as text.
    served
        The arguments that it serves: the same, or their pattern if sizes are symbolic.
    shapes
        The shapes that it serves; the leaves are the tensors of the arguments.
    """

    arguments: str
    served: str
    shapes: Shapes | None
    inputs: list[int]
    weights: list[int]
    outputs: list[int]
    result: ResultText
    state: str

    @classmethod
    def of(cls, program: CompiledCall, form: Interpretable, probe: Any) -> _Seen:
        artifact = program.artifact
        args, kwargs = form.bind(*program.call)
        text, pattern, tensors, state = probe(*args, **kwargs)
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        leaves = pytree.tree_leaves(program.call)
        known = {name: place for place, name in enumerate(form.tensor_names())}
        missing = [name for name in artifact.weights if name not in known]
        if missing:
            raise SaveError(
                f"TorchScript does not keep the tensor {missing[0]!r} of the module: register it "
                "as a buffer"
            )
        computed = [TensorPlace(i) for i in range(computed_count(artifact.outputs))]
        arguments = [
            TensorPlace(argument_source(places[id(leaf)])) if id(leaf) in places else leaf
            for leaf in leaves
        ]
        made = materialize(
            artifact.outputs, computed, arguments, view=TensorPlace.viewed, size=SizePlace.of
        )
        sources = [leaf.source for leaf in made if isinstance(leaf, TensorPlace)]
        # The tensors whose sizes are symbols follow those of the result.
        homes = homes_of(artifact, len(sources))
        sources += [argument_source(places[id(leaves[home.leaf])]) for home in homes.values()]
        shapes = artifact.shapes and _of_tensors(artifact.shapes, places, leaves)
        structure = structure_of(artifact.output_structure)
        if holds_objects(structure):
            raise SaveError(
                "the result contains objects of classes that a saved file cannot store: "
                "return tuples, lists or dicts of tensors"
            )
        value = plain(pytree.tree_unflatten(made, structure), form.names)
        return cls(
            arguments=text,
            served=text if shapes is None else pattern,
            shapes=shapes,
            inputs=[places[id(leaves[index])] for index in artifact.inputs],
            weights=[known[name] for name in artifact.weights],
            outputs=sources,
            result=ResultText(
                annotation(value),
                Writer("_tensors", {name: str(home) for name, home in homes.items()}).write(value),
                Writer("_eager").write(value) if form.returns is None else "",
            ),
            state=state,
        )


def _of_tensors(shapes: Shapes, places: Mapping[int, int], leaves: Sequence[Any]) -> Shapes:
    """Return the shapes with tensors numbered among the tensors instead of all leaves."""
    at = {leaf: places[id(leaves[leaf])] for leaf in shapes.leaves}
    return Shapes.canonical(
        shapes.symbols,
        {at[leaf]: sizes for leaf, sizes in shapes.leaves.items()},
        shapes.guards,
        {symbol.name: hint for symbol, hint in zip(shapes.symbols, shapes.hints, strict=True)},
    )


def _alternatives(results: Sequence[ResultText]) -> str:
    *others, last = [result.compiled for result in results]
    lines = [
        f"        if _form == {i}:\n            return {text}" for i, text in enumerate(others)
    ]
    return "\n".join([*lines, f"        return {last}"])


def _tuple(items: Iterable[str]) -> str:
    return "(" + "".join(f"{item}, " for item in items).rstrip() + ")"


def _attribute(name: str) -> str:
    """Write a dotted name as an expression; children of a Sequential are named by numbers."""
    text = "self"
    for part in name.split("."):
        text = f"{text}.{part}" if part.isidentifier() else f"getattr({text}, {part!r})"
    return text


def _description(
    name: str, module: torch.jit.ScriptModule, programs: Sequence[tuple[_Seen, Artifact]]
) -> dict[str, Any]:
    state = module.state_dict()
    check_saved(state)
    tensors = {tensor.data_ptr(): tensor for tensor in state.values()}.values()
    return {
        "model": name,
        "versions": {
            "tvmify": metadata.version("tvmify"),
            "torch": torch.__version__,
            "tvm": metadata.version("apache-tvm"),
        },
        "tensors": {"number": len(tensors), "bytes": sum(t.nbytes for t in tensors)},
        "signatures": [
            {
                "arguments": program.served,
                **({} if program.shapes is None else {"shapes": program.shapes.to_json()}),
                "target": json.loads(artifact.target),
                "needs": Target.parse(artifact.target).requirements,
                "bytes": len(artifact.library),
            }
            for program, artifact in programs
        ],
    }
