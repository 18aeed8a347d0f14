"""A copy of a module tree that shares its tensors."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from tvmify.torch_compat.parts import follows_parameters, hidden_names


def twin(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module with the same classes, tensors and attributes, but its own dictionaries.
    ``torch.jit.script`` writes to attributes of its module, and ``torch.export`` temporarily
    replaces parameters: neither may happen to a module that other threads are calling.
    """
    copies: dict[int, torch.nn.Module] = {}
    result = _copy(module, copies)
    for original in copies.values():
        _rebind(original, copies)
    return result


def _copy(module: torch.nn.Module, copies: dict[int, torch.nn.Module]) -> torch.nn.Module:
    if id(module) in copies:
        return copies[id(module)]
    if isinstance(module, torch.jit.ScriptModule):
        copies[id(module)] = module
        return module
    # not the class's own __new__: torch.fx.GraphModule's makes a new class without a forward
    copy = copies[id(module)] = object.__new__(type(module))
    attributes = {key: _own(value) for key, value in vars(module).items()}
    attributes["_modules"] = {
        name: child if child is None else _copy(child, copies)
        for name, child in module._modules.items()
    }
    vars(copy).update(attributes)
    return copy


def _own(value: Any) -> Any:
    """Copy containers, which a forward may write to, but not their contents."""
    return value.copy() if type(value) in (dict, OrderedDict, list, set) else value


def _rebind(module: torch.nn.Module, copies: dict[int, torch.nn.Module]) -> None:
    """Rebind methods that are stored as attributes to the twins."""
    attributes = vars(module)
    for key, value in attributes.items():
        if isinstance(value, types.MethodType) and id(value.__self__) in copies:
            attributes[key] = types.MethodType(value.__func__, copies[id(value.__self__)])


def with_forward(cls: type[torch.nn.Module], forward: Callable[..., Any]) -> type[torch.nn.Module]:
    """Return a subclass with another forward that is called as its base: libraries such as
    transformers look up what they know of a class by its name.
    """
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {"forward": forward} | named)


def make_buffers(module: torch.nn.Module) -> None:
    """Turn tensors that are plain attributes of a twin into non-persistent buffers, except those
    whose class has an attribute of the same name, which would hide the buffer.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return
    hidden = hidden_names(module)
    for name, value in list(vars(module).items()):
        if type(value) is torch.Tensor and name not in hidden and not hasattr(type(module), name):
            del vars(module)[name]
            module.register_buffer(name, value, persistent=False)


def _buffer_names(module: torch.nn.Module) -> set[str]:
    return module._buffers.keys() | {n for n, x in vars(module).items() if type(x) is torch.Tensor}


def changed_attribute(module: torch.nn.Module, original: torch.nn.Module) -> str | None:
    """Return the dotted name of an attribute that differs between a module and its twin. Parameters
    and buffers do not count, since ``torch.export`` records writes to them and replaces them
    while it runs; neither do attributes of objects.
    """
    pairs = zip(
        module.named_modules(remove_duplicate=False),
        original.named_modules(remove_duplicate=False),
        strict=False,
    )
    for (prefix, ours), (_, theirs) in pairs:
        now, before = vars(ours), vars(theirs)
        tensors = _buffer_names(theirs)
        for key in now.keys() | before.keys():
            if follows_parameters(ours, key):  # torch.export assigns parameters
                continue
            if key == "_non_persistent_buffers_set":
                continue
            if key == "_buffers" or key in tensors:
                same = tensors == _buffer_names(ours)
                if key not in ("_buffers", *ours._buffers):  # one that `make_buffers` left
                    same = same and now.get(key) is before.get(key)
            elif key in ("_parameters", "_modules"):
                same = now[key].keys() == before[key].keys()
            else:
                same = _same(now.get(key, _MISSING), before.get(key, _MISSING))
            if not same and key not in _HOOKS:
                return f"{prefix}.{key}" if prefix else key
    return None


_MISSING = object()
#: Set by our own forward, and by transformers, which adds hooks when a forward first asks for
#: hidden states; those are recorded like anything else.
_HOOKS = ("forward", "_forward_hooks", "_output_capturing_hooks_installed")


def _same(now: Any, before: Any) -> bool:
    if now is before or type(now) is not type(before):
        return now is before
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_same(now[key], before[key]) for key in now)
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(map(_same, now, before))
    if isinstance(now, (set, int, float, str)):
        return now == before
    # twins of submodules and their methods differ from the originals
    return isinstance(now, (torch.nn.Module, types.MethodType))
