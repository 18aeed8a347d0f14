"""What a program reads from its module: tensors by name, everything else by value."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tvmify.capture.values import protect
from tvmify.torch_compat.parts import (
    FLAT_WEIGHTS,
    FLAT_WEIGHTS_NAMES,
    Part,
    elements,
    key_part,
    parts,
)


class ModulePath(str):
    """Stands for a module while a graph is walked: its dotted name from the root."""

    __slots__ = ()

    def attribute(self, name: str) -> str:
        """Return the dotted name of an attribute of the module."""
        return f"{self}.{name}" if self else name


@dataclass(frozen=True)
class WeightName:
    """Stands for a tensor inside an attribute's value."""

    name: str


@dataclass
class State:
    """The attributes that a TorchScript program reads, recorded while its graph is walked.

    Attributes
    ----------
    root
        The module, as TorchScript's C++ object; dropped with `forget_root`, so that tensors which
        the module replaces later are not kept alive.
    tensors
        Parameters, buffers and tensor attributes by dotted name, in order of their first use. A
        tensor in a list, tuple or dictionary has its index or `key_part` as the last part of its
        name.
    values
        All other attributes: tensors inside are replaced by a `WeightName`, modules by a
        `ModulePath`.
    """

    root: torch._C.ScriptModule | None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def find(self, name: str) -> Any:
        """Record an attribute, and return it with its tensors replaced by their names."""
        if name not in self.values:
            assert self.root is not None, f"{name} was not read while the graph was walked"
            path, _, last = name.rpartition(".")
            owner: Any = self.root
            for part in path.split(".") if path else ():
                owner = owner.getattr(part)
            if last == FLAT_WEIGHTS and owner.hasattr(FLAT_WEIGHTS_NAMES):
                # The parameters themselves: the list follows them in eager calls only.
                names = owner.getattr(FLAT_WEIGHTS_NAMES)
                inside = ModulePath(path)
                values = [self.find(inside.attribute(weight)) for weight in names]
            else:
                values = self._named(name, owner.getattr(last))
            self.values[name] = values
        return self.values[name]

    def _named(self, name: str, value: Any) -> Any:
        if isinstance(value, torch._C.ScriptModule):
            return ModulePath(name)
        if isinstance(value, torch.Tensor):
            self.tensors[name] = value
            return WeightName(name)
        if isinstance(value, list):
            return [self._named(f"{name}.{i}", item) for i, item in enumerate(value)]
        if isinstance(value, tuple):
            items = [self._named(f"{name}.{i}", item) for i, item in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, dict):
            return {k: self._named(f"{name}.{key_part(k)}", item) for k, item in value.items()}
        return value

    def forget_root(self, owner: Any) -> None:
        """Keep only tensors that ``owner`` lacks under their names."""
        self.root = None
        for name, tensor in list(self.tensors.items()):
            try:
                found = resolve(owner, name)
            except (AttributeError, LookupError, ValueError):
                continue
            if found is tensor:
                del self.tensors[name]

    def read(self, name: str, tensors: dict[str, torch.Tensor]) -> Any:
        """Return a read-only copy of an attribute's value, with tensors taken from ``tensors``."""
        return protect(_filled(self.find(name), tensors))


def _filled(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, WeightName):
        return tensors[value.name]
    if isinstance(value, list):
        return [_filled(item, tensors) for item in value]
    if isinstance(value, tuple):
        items = [_filled(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: _filled(item, tensors) for key, item in value.items()}
    return value


def resolve(root: Any, name: str) -> Any:
    """Return the current value of a dotted name: attributes, then indices and keys.

    Raises
    ------
    AttributeError, LookupError, ValueError
        There is no such attribute (any more).
    """
    value = root
    for part in name.split("."):
        if isinstance(value, dict):
            (value,) = (item for key, item in value.items() if key_part(key) == part)
        elif isinstance(value, (list, tuple, deque)):
            value = value[int(part)]
        else:
            value = getattr(value, part)
    return value


def present(root: Any, names: Iterable[str]) -> list[Any]:
    """Return the current values of the dotted names that still have one."""
    values = []
    for name in names:
        try:
            values.append(resolve(root, name))
        except (AttributeError, LookupError, ValueError):
            continue  # removed since
    return values


def tensor_names(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in a module tree with its dotted name, attributes included. Names that do
    not lead back to their tensor are left out.
    """
    for part in parts(module):
        for name, tensor in _tensors_of(part) if part.is_named else ():
            if any(found is tensor for found in present(module, [name])):
                yield name, tensor


def _tensors_of(part: Part) -> Iterator[tuple[str, torch.Tensor]]:
    attributes = {k: value for k, value in vars(part.module).items() if not k.startswith("_")}
    for holder in (part.module._parameters, part.module._buffers, attributes):
        for key, value in holder.items():
            yield from _tensors_in(part.attribute(key), value)


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(elements(value)):
            yield from _tensors_in(f"{name}.{i}", item)
    elif isinstance(value, dict):
        for key, item in dict.items(value):
            yield from _tensors_in(f"{name}.{key_part(key)}", item)
