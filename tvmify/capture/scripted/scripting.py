"""Scripts a module or function, unless TorchScript would give its code another meaning."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch.jit import _recursive
from torch.nn.utils.parametrize import is_parametrized

from tvmify.capture.nested import avoid_nested_tensors
from tvmify.capture.questions import question_of, reached
from tvmify.capture.scripted.constants import constant_attributes
from tvmify.capture.scripted.interpreter import source_line
from tvmify.capture.scripted.leftovers import empty, noting
from tvmify.capture.scripted.meaning import misread_dtype, misread_function, updates_dicts
from tvmify.capture.scripted.script_types import distinguish
from tvmify.capture.scripted.unfolding import unfolded
from tvmify.capture.twin import twin
from tvmify.errors import described
from tvmify.torch_compat.parts import hidden_names, replaced_methods
from tvmify.torch_compat.silence import silenced
from tvmify.torch_compat.tracing import tracing

#: Has a graph and a schema, or its forward does.
Scripted: TypeAlias = "torch.jit.ScriptModule | torch.jit.ScriptFunction"
#: Methods that run before forward when a module is called.
_CALLS = ("__call__", "_call_impl")


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Keep TorchScript from inserting autocast's casts, since its rules differ from eager's."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


class CannotScript(Exception):
    """Why ``torch.jit.script`` refused a module, as one line."""


@contextlib.contextmanager
def scripting(callable_: Any) -> Iterator[Scripted]:
    """Script a module or function, as `script` does, for the time of the context.

    Afterwards nothing that was made on the way holds the module's tensors.

    Raises
    ------
    CannotScript
        As `script` does.
    """
    made: list[torch.nn.Module] = []
    try:
        yield script(callable_, made)
    finally:
        empty(made)


def script(callable_: Any, made: list[torch.nn.Module] | None = None) -> Scripted:
    """Script a module or function without changing it.

    Parameters
    ----------
    made
        Gets every module that is made on the way.

    Raises
    ------
    CannotScript
        It cannot be scripted; the message is the reason in one line, with the source line.
    """
    functions = list(reached(callable_))
    if (question := question_of(functions)) is not None:
        raise CannotScript(f"it uses {question}, which means something else in TorchScript")
    source, constants = callable_, frozenset[str]()
    made = [] if made is None else made
    if isinstance(callable_, torch.nn.Module):
        _refuse_what_is_overlooked(callable_)
        source, constants = twin(callable_), constant_attributes(callable_)
        made += (m for m in source.modules() if not isinstance(m, torch.jit.ScriptModule))
        avoid_nested_tensors(source)
        distinguish(source)
    # That TorchScript is deprecated is nothing a user could act on. Other warnings are about
    # annotations, which eager and torch.export do not read.
    with tracing(), without_autocast(), silenced(), unfolded(constants), noting(made):
        types = _types_of(source)
        try:
            scripted = torch.jit.script(source)
        except Exception as error:
            _types_of(source, types)
            raise CannotScript(_one_line(error)) from error
    if not isinstance(scripted, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        # TorchScript turns a callable object into an object, without a graph of its call
        raise CannotScript(f"a {type(callable_).__qualname__} is not a function")
    if isinstance(scripted, torch.jit.ScriptModule) and not hasattr(scripted, "forward"):
        raise CannotScript("forward is overloaded, which TorchScript turns into several methods")
    if any(function.code.updates for function in functions) and updates_dicts(scripted):
        raise CannotScript("it updates an item of a dict, which TorchScript does not do in place")
    if (name := misread_function(scripted, functions)) is not None:
        raise CannotScript(f"{name} is given a tensor, which means something else in TorchScript")
    if (text := misread_dtype(scripted)) is not None:
        raise CannotScript(f"{text} may be given a dtype, which TorchScript takes for a size")
    return scripted


def _refuse_what_is_overlooked(module: torch.nn.Module) -> None:
    """Refuse what Python looks at but TorchScript ignores. To TorchScript, a call of a module is
    its forward, and an attribute is what is registered.
    """
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        where = f" of {path!r}" if path else ""
        if names := hidden_names(part):
            raise CannotScript(f"an attribute{where} hides the registered {min(names)!r}")
        if names := replaced_methods(part):  # it would call the method of the class
            raise CannotScript(f"an attribute{where} replaces the method {min(names)!r}")
        if not isinstance(part, torch.fx.GraphModule) and (name := _own_call(part)):
            raise CannotScript(f"a class{where} defines {name}")
        if is_parametrized(part):  # scripting succeeds, and the script raises
            raise CannotScript(f"a weight{where} is parametrized")


def _own_call(module: torch.nn.Module) -> str | None:
    bases = type(module).__mro__[: type(module).__mro__.index(torch.nn.Module)]
    held = (vars(module), *map(vars, bases))
    return next((name for name in _CALLS if any(name in members for members in held)), None)


def _types_of(source: Any, replacement: dict[type, Any] | None = None) -> dict[type, Any]:
    """Return, or restore, the TorchScript types of a module's classes. After a failure torch keeps
    the incomplete types, and then fails for the next module of that class, unable to redefine
    methods.
    """
    store = _recursive.concrete_type_store.type_store
    classes = {type(m) for m in source.modules()} if isinstance(source, torch.nn.Module) else set()
    present = {class_: list(store.get(class_, ())) for class_ in classes}
    for class_, types in (replacement or {}).items():
        if types:
            store[class_] = types
        else:
            store.pop(class_, None)  # torch would keep the class forever
    return present


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    message = text.partition("\n")[0].rstrip(":. ") or type(error).__name__
    if isinstance(error, (LookupError, AttributeError, AssertionError)):
        message = described(error)  # of torch itself: a name, or nothing that says what of
    message = re.sub(r" at 0x[0-9a-f]+", "", message)
    place = source_line(text)
    return f"{message} ({place})" if place else message
