"""A module as TorchScript, for the calls that no compiled code serves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_type_hints

import torch
from torch.jit import _recursive
from torch.utils import _pytree as pytree

from tvmify.artifact.structure import find_class
from tvmify.capture.exporting import quiet
from tvmify.capture.scripted.fingerprint import describe
from tvmify.capture.scripted.named_tuples import demangled
from tvmify.capture.scripted.scripting import Scripted, script
from tvmify.capture.state import ModulePath, State, key_part, resolve
from tvmify.capture.twin import twin
from tvmify.errors import SaveError
from tvmify.signature import Args, Kwargs
from tvmify.torch_compat.tracing import tracing

_SCALARS = {bool: "bool", int: "int", float: "float", str: "str"}


@dataclass
class Interpretable:
    """A module or function as a TorchScript module, and how to write a forward that calls it.

    Attributes
    ----------
    module
        Its ``forward`` computes a call; its parameters and buffers have their original names.
    parameters
        The parameters of the new forward, as source: ``"x: Tensor"``, ``"scale: float=1.0"``.
    arguments
        An expression of the parameters for each argument of ``module.forward``.
    returns
        The annotation of the result; None if ``module.forward`` returns a tuple of the tensors in
        it.
    names
        The names in annotations that are not TorchScript's own types: classes of named tuples.
    state
        Dotted names of the attributes that the program reads, tensors or not.
    """

    module: torch.jit.ScriptModule
    parameters: list[str]
    arguments: list[str]
    returns: str | None
    names: dict[str, Any] = field(default_factory=dict)
    state: list[str] = field(default_factory=list)

    def bind(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return the arguments of the new forward for a call of the original."""
        return args, kwargs

    def tensor_names(self) -> list[str]:
        """Return the dotted name of each tensor in the state, in order."""
        names: list[str] = []
        for name in self.state:
            _collect_tensors(name, resolve(self.module, name), names)
        return names


def _collect_tensors(name: str, value: Any, names: list[str]) -> None:
    if isinstance(value, torch.Tensor):
        names.append(name)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _collect_tensors(f"{name}.{i}", item, names)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect_tensors(f"{name}.{key_part(key)}", item, names)


# ------------------------------------------------------------------------------------- scripted


def interpretable(callable_: Callable[..., Any] | Scripted) -> Interpretable:
    """Script a module or function; the result is valid for all arguments.

    Raises
    ------
    CannotScript
        It cannot be scripted.
    SaveError
        Its signature names a class that cannot be imported, or has a default that has no source
        form.
    """
    is_script = isinstance(callable_, (torch.jit.ScriptModule, torch.jit.ScriptFunction))
    module: Any = callable_ if is_script else script(callable_)
    if isinstance(module, torch.jit.ScriptFunction):
        module = _module_of(module)
    schema: Any = module.forward.schema
    state = State(module._c)
    describe(module.forward.inlined_graph, schema, state)  # to record what it reads
    names: dict[str, Any] = {}
    parameters, arguments = _signature(schema, names)
    return Interpretable(
        module=module,
        parameters=parameters,
        arguments=arguments,
        returns=_annotation(schema.returns[0].type, names),
        names=names,
        state=[n for n, value in state.values.items() if not isinstance(value, ModulePath)],
    )


def _module_of(function: torch.jit.ScriptFunction) -> torch.jit.ScriptModule:
    # In a class of its own, since modules of one class share their methods.
    with tracing(beside_others=True):
        module: Any = torch.jit.script(type("Function", (torch.nn.Module,), {})())
    names: dict[str, Any] = {}
    schema: Any = function.schema
    parameters, arguments = _signature(schema, names, skip=0)
    returns = _annotation(schema.returns[0].type, names)
    header = f"def forward({', '.join(['self', *parameters])}) -> {returns}:"
    source = f"{header}\n    return function({', '.join(arguments)})\n"
    return define(module._c, source, names | {"function": function})


def define(
    module: torch._C.ScriptModule, source: str, names: Mapping[str, Any]
) -> torch.jit.RecursiveScriptModule:
    """Add methods to a module from TorchScript source, which may use these names."""
    wrap: Any = _recursive.wrap_cpp_module
    untyped: Any = module  # by its stub
    with tracing(beside_others=True):
        untyped._define(wrap(module)._concrete_type, source, names.get)
        return wrap(module)  # again, since it lists the existing methods


def _signature(schema: Any, names: dict[str, Any], skip: int = 1) -> tuple[list[str], list[str]]:
    parameters, arguments = [], []
    taken: set[str] = set()
    for argument in list(schema.arguments)[skip:]:
        name = argument.name
        while name in taken:  # a traced forward may have two parameters of one name
            name += "_"
        taken.add(name)
        if argument.kwarg_only and "*" not in parameters:
            parameters.append("*")
        default = f"={_literal(argument)}" if argument.has_default_value() else ""
        parameters.append(f"{name}: {_annotation(argument.type, names)}{default}")
        prefix = f"{argument.name}=" if argument.kwarg_only else ""
        arguments.append(prefix + name)
    return parameters, arguments


def _literal(argument: Any) -> str:
    value = argument.default_value
    items = value if isinstance(value, list) else [value]
    if all(item is None or type(item) in _SCALARS for item in items):
        return repr(value)
    raise SaveError(
        f"the default of {argument.name!r} is {value!r}, which cannot be written in TorchScript: "
        "make it None, a number, a string or a list of those"
    )


def _annotation(type_: torch._C.JitType, names: dict[str, Any]) -> str:
    def class_name(match: re.Match[str]) -> str:
        path = demangled(match[0]).removeprefix("__torch__.")
        found = find_class(path)
        if found is None:
            raise SaveError(
                f"forward takes or returns a {path}, which is not importable here: define the "
                "class at the top level of a module"
            )
        names[found.__name__] = resolved_class(found)
        return found.__name__

    return re.sub(r"__torch__\.[\w.]+", class_name, type_.annotation_str)


def resolved_class(class_: type) -> Any:
    """Return a named tuple class without string annotations, as TorchScript needs it."""
    if not hasattr(class_, "__annotations__"):
        return class_  # of collections.namedtuple
    resolved: Any = NamedTuple(class_.__name__, list(get_type_hints(class_).items()))
    resolved.__module__, resolved.__qualname__ = class_.__module__, class_.__qualname__
    return resolved


# --------------------------------------------------------------------------------------- traced


@dataclass
class _Traced(Interpretable):
    """A module recorded for the tensors of one call, with the other arguments built in."""

    positional: list[str] = field(default_factory=list)
    recorded: dict[str, Any] = field(default_factory=dict)

    def bind(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        given = _named(self.positional, args, kwargs)
        taken = {name: value for name, value in given.items() if _has_tensors(value)}
        if _without_tensors(given) != _without_tensors(self.recorded):
            raise SaveError(
                f"a module that cannot be scripted is saved for one set of arguments, not for "
                f"({', '.join(self.recorded)}) and ({', '.join(given)}), or other values of "
                "these: save a file for each"
            )
        return (), taken


def traced(callable_: Callable[..., Any], args: Args, kwargs: Kwargs) -> Interpretable:
    """Record a module or function for the arguments of one call. The result may be wrong for other
    shapes, since branches on shapes are not recorded: see `agrees`.

    Raises
    ------
    SaveError
        It cannot be recorded, or an argument has a type that TorchScript lacks.
    """
    is_module = isinstance(callable_, torch.nn.Module)
    forward = type(callable_).forward if is_module else callable_
    positional = [p.name for p in inspect.signature(forward).parameters.values()][is_module:]
    leaves, structure = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def flat(self: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        given, named = pytree.tree_unflatten(filled, structure)
        result = forward(self, *given, **named) if is_module else forward(*given, **named)
        return tuple(x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor))

    module = twin(callable_) if isinstance(callable_, torch.nn.Module) else torch.nn.Module()
    base = type(module)
    module.__class__ = type(
        base.__name__, (base,), {"forward": flat, "__module__": base.__module__}
    )
    tensors = tuple(leaves[place] for place in places)
    with tracing(beside_others=True), quiet(), torch.no_grad():
        try:
            recorded: Any = torch.jit.trace(module, tensors, check_trace=False, strict=False)
        except Exception as error:
            raise SaveError(f"torch.jit.trace cannot record {base.__name__}: {error}") from error
    given = {k: v for k, v in _named(positional, args, kwargs).items() if _has_tensors(v)}
    paths = [path for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
    return _Traced(
        module=recorded,
        parameters=[f"{name}: {_type_of(name, value)}" for name, value in given.items()],
        arguments=[_expression(positional, paths[place]) for place in places],
        returns=None,
        positional=positional,
        recorded=_named(positional, args, kwargs),
    )


def agrees(
    recorded: Interpretable, callable_: Callable[..., Any], call: tuple[Args, Kwargs]
) -> bool:
    """Whether a recorded module gives the original's results for a call. The call was exported as
    well, so no branch depends on elements of tensors: if the results are equal for some elements,
    the same operators ran.
    """
    args, kwargs = call
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    with torch.no_grad():
        expected = callable_(*args, **kwargs)
        try:
            result = recorded.module(*tensors)
        except RuntimeError:
            return False  # the recorded shapes do not fit
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    wanted = [leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, torch.Tensor)]
    return len(results) == len(wanted) and all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True)
        for a, b in zip(results, wanted, strict=True)
    )


def _named(positional: Sequence[str], args: Args, kwargs: Kwargs) -> dict[str, Any]:
    return {_name(positional, i): value for i, value in enumerate(args)} | kwargs


def _name(positional: Sequence[str], index: int) -> str:
    return positional[index] if index < len(positional) else f"argument_{index}"


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _without_tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    def plain(leaf: Any) -> Any:
        return torch.Tensor if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(plain, arguments)


def _expression(positional: Sequence[str], path: tuple[Any, ...]) -> str:
    """Return the source expression of a leaf of (args, kwargs)."""
    kind, top, *rest = path
    text = _name(positional, top.idx) if kind.idx == 0 else str(top.key)
    for key in rest:
        text += f"[{key.idx}]" if isinstance(key, pytree.SequenceKey) else f"[{_key(key)!r}]"
    return text


def _key(key: Any) -> Any:
    return key.key if isinstance(key, pytree.MappingKey) else key.name


def _type_of(name: str, value: Any) -> str:
    """Return the annotation of a parameter for an example value."""
    if isinstance(value, torch.Tensor):
        return "Tensor"
    if type(value) in _SCALARS:
        return _SCALARS[type(value)]
    items = list(value.values()) if type(value) is dict else value
    if type(value) is tuple:
        return f"Tuple[{', '.join(_type_of(name, item) for item in items)}]"
    if type(value) in (list, dict):
        types = {_type_of(name, item) for item in items}
        kinds = {type(key) for key in value} if type(value) is dict else set()
        if len(types) == 1 and len(kinds) <= 1 and kinds <= _SCALARS.keys():
            key = "".join(f"{_SCALARS[kind]}, " for kind in kinds)
            return f"{'Dict' if type(value) is dict else 'List'}[{key}{types.pop()}]"
    raise SaveError(
        f"argument {name!r} holds a {type(value).__name__}, which TorchScript lacks: pass "
        "tensors, numbers, and tuples, lists or dicts of one type"
    )
