"""The modules that a module consists of, including those that it does not register."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import torch
from torch import nn

_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_HOLDERS = (*_SEQUENCES, *_SETS, dict, types.MethodType, functools.partial, nn.Module)
_METHODS = (types.FunctionType, staticmethod, classmethod)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
#: Attributes of torch's recurrent modules: a list of their parameters, which each call makes again
#: if a parameter was replaced, and the names of these.
FLAT_WEIGHTS, FLAT_WEIGHTS_NAMES = "_flat_weights", "_flat_weights_names"
_OF_PARAMETERS = (FLAT_WEIGHTS, "_flat_weight_refs")


class Part(NamedTuple):
    """One module of a tree."""

    path: str  # from the root: names, indices and keys joined by dots; empty for the root
    module: nn.Module
    #: Whether attributes, indices and keys lead there, as they cannot for an element of a set.
    is_named: bool = True
    #: Whether the root registers it, so that ``train()`` and ``to()`` reach it.
    is_registered: bool = True

    def attribute(self, name: str) -> str:
        """Return the dotted name of one of the module's attributes."""
        return f"{self.path}.{name}" if self.path else name


def parts(root: nn.Module) -> Iterator[Part]:
    """Yield a module and all modules that it holds, each once, the registered ones first.

    Unregistered modules are in a list, tuple, dict or set, or were set without
    ``nn.Module.__setattr__``. A module that contains the root, such as its parent, is not a part.
    """
    registered = [Part(path, module) for path, module in root.named_modules()]
    yield from registered
    seen = {id(part.module) for part in registered}
    todo = deque(registered)
    while todo:
        part = todo.popleft()
        for path, module, is_named in _held(part):
            if id(module) in seen or any(_is_same(child, root) for child in module.modules()):
                continue
            for child_path, child in module.named_modules(prefix=path):
                if id(child) not in seen:
                    seen.add(id(child))
                    found = Part(child_path, child, is_named, is_registered=False)
                    todo.append(found)
                    yield found


def _is_same(module: nn.Module, root: nn.Module) -> bool:
    # A decorated instance shares everything it registers with the eager original.
    return module is root or module.__dict__.get("_parameters") is root.__dict__["_parameters"]


def follows_parameters(module: nn.Module, name: str) -> bool:
    """Whether an attribute only repeats parameters, so that it is not part of a module's state."""
    return name in _OF_PARAMETERS and isinstance(module, nn.RNNBase)


def trains(module: nn.Module) -> bool:
    """Return whether a module is in training mode; ``torch.jit.freeze`` removes the attribute."""
    return getattr(module, "training", False)


def hidden_names(module: nn.Module) -> set[str]:
    """Return the registered names that an attribute of the object or class shadows."""
    registered = {name for kind in _REGISTRIES for name in module.__dict__[kind]}
    usual = vars(nn.Module)
    of_class = {n for base in type(module).__mro__ for n in vars(base) if n not in usual}
    return registered & (vars(module).keys() | of_class)


def replaced_methods(module: nn.Module) -> set[str]:
    """Return the names of the methods that an attribute of the object replaces."""
    bases = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    members = {name: member for base in reversed(bases) for name, member in vars(base).items()}
    return {name for name in vars(module) if isinstance(members.get(name), _METHODS)}


def slots(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the attributes that objects of a class keep in ``__slots__``, outside `vars`."""
    members = (item for base in cls.__mro__ for item in vars(base).items())
    return tuple(n for n, member in members if isinstance(member, types.MemberDescriptorType))


def key_part(key: object) -> str:
    """Encode a key, which may be ``"cpu"`` or ``"a.b"``, as a part of a dotted name.

    PyTorch makes attributes of these names, so none may be the name of a module's method. The keys
    1 and ``"1"`` are different.
    """
    quoted = quote(str(key), safe="").replace(".", "%2e")
    return f"[{quoted}]" if isinstance(key, str) else f"[%{quoted}]"


def elements(holder: Any) -> list[Any]:
    """Return the elements of a list, tuple, deque or set, or the values of a dict.

    What a subclass overrides is not called: the tuples of e3nn refuse to tell their length.
    """
    if isinstance(holder, dict):
        return list(dict.values(holder))
    kind: Any = next(kind for kind in (*_SEQUENCES, *_SETS) if isinstance(holder, kind))
    return list(kind.__iter__(holder))


def _held(part: Part) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the modules that plain attributes of a module lead to, with their paths."""
    if isinstance(part.module, torch.jit.ScriptModule):
        return  # its attributes live in C++
    for name, value in part.module.__dict__.items():
        if name not in _REGISTRIES and isinstance(value, _HOLDERS):
            yield from _modules_in(part.attribute(name), value, part.is_named, set())


def _modules_in(
    path: str, value: Any, is_named: bool, seen: set[int]
) -> Iterator[tuple[str, nn.Module, bool]]:
    if isinstance(value, nn.Module):
        yield path, value, is_named
        return
    if not isinstance(value, _HOLDERS) or id(value) in seen:
        return
    seen.add(id(value))  # a list may contain itself
    if isinstance(value, types.MethodType):
        yield from _modules_in(f"{path}.__self__", value.__self__, is_named, seen)
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield from _modules_in(f"{path}.{name}", getattr(value, name), is_named, seen)
    else:
        items = elements(value)
        if any(issubclass(kind, _HOLDERS) for kind in set(map(type, items))):
            is_dict = isinstance(value, dict)
            names = map(key_part, dict.__iter__(value)) if is_dict else range(len(items))
            named = is_named and not isinstance(value, _SETS)
            for name, item in zip(names, items, strict=True):
                yield from _modules_in(f"{path}.{name}", item, named, seen)
