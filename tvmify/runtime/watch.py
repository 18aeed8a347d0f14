"""What compiled code assumes about a module, and the native guard that sees it change.

A compiled program holds for one state of its module: these attributes, submodules, modes and
hooks. The guard compares all of them by identity before every call, in native code, at some
nanoseconds each, so that assigning to any attribute anywhere in the module is noticed. What no
identity shows is not: a list, dict or other object edited in place, ``tensor.data`` written to, a
global variable. ``refresh()`` is for those.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tvmify.errors import NotCompiled
from tvmify.runtime.native import Guard
from tvmify.signature import unreadable_kind

# The bookkeeping of nn.Module itself: what matters of it (parameters, hooks …) is watched by name.
_BOOKKEEPING = frozenset(nn.Module().__dict__) - {"training"}
#: How the names of attributes begin under which dispatchers live; they are not the module's own.
DISPATCHER = "_tvmify_"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BY_VALUE = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Watched:
    """A module as it was when the guard was taken.

    Attributes
    ----------
    guard
        Native; its ``changed()`` is 0 while nothing of the module has changed.
    state
        Equal for two moments between which no compiled program went stale: everything watched,
        the values of tensors apart.
    names
        For each item of ``state`` the dotted name of the attribute, for messages.
    training
        Dotted name of the first module in training mode ("" is the module itself), or None.
    hooked
        Dotted name of the first submodule with a forward hook ("" is the module itself), or None.
    requires_grad
        Whether any parameter does.
    """

    guard: Guard
    state: tuple[Hashable, ...]
    names: tuple[str, ...]
    training: str | None
    hooked: str | None
    requires_grad: bool

    def changes_since(self, earlier: Watched) -> list[str]:
        """Return the names of the attributes that differ between two moments."""
        before = dict(zip(earlier.names, earlier.state, strict=True))
        now = dict(zip(self.names, self.state, strict=True))
        absent = object()
        return [n for n in before | now if before.get(n, absent) != now.get(n, absent)]

    def check_hooks(self) -> None:
        """Refuse hooks that compiled code would not run.

        Raises
        ------
        NotCompiled
            A submodule has a forward hook, or the module itself where that is watched.
        """
        if self.hooked is not None:
            where = f"submodule {self.hooked!r}" if self.hooked else "the module"
            raise NotCompiled(
                f"{where} has a forward hook",
                "Remove the hook, or register it on a module whose forward is decorated.",
            )


class _ByIdentity:
    """An attribute that compares by identity; holding it keeps its address from being reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def watch(
    module: nn.Module | None,
    constants: Sequence[torch.Tensor] = (),
    written: Sequence[torch.Tensor] = (),
    *,
    own_hooks: bool = False,
) -> Watched:
    """Take a module's state and a guard over it.

    Parameters
    ----------
    module
        None stands for a function, which has no state.
    constants
        Tensors outside of the module that the guard covers too.
    written
        Tensors of the module that its own calls write to. They are read at every call, so their
        elements may change.
    own_hooks
        Watch the hooks of the module itself, too. Those of its submodules always are.
    """
    slots: list[tuple[dict[str, Any], str, Any]] = []
    sizes: list[tuple[dict[Any, Any], int]] = []
    tensors = list(constants)
    state: list[tuple[str, Hashable]] = []
    training = hooked = None

    for path, part in module.named_modules() if module is not None else ():
        prefix = f"{path}." if path else ""
        if training is None and part.training and (not path or _heeds_training(type(part))):
            training = path
        if isinstance(part, torch.jit.ScriptModule):
            # Its attributes live in C++, where a new Python object is made at every look: only
            # its tensors can be watched. Its children come later in this walk.
            own = dict(part.named_parameters(recurse=False))
            own |= dict(part.named_buffers(recurse=False))
            tensors += own.values()
            state += [(prefix + name, _comparable(value)) for name, value in own.items()]
            state.append((prefix + "training", part.training))
            continue
        attributes = part.__dict__
        sizes.append((attributes, len(attributes)))
        for name, value in attributes.items():
            if name in _BOOKKEEPING or name.startswith(DISPATCHER):
                continue
            slots.append((attributes, name, value))
            state.append((prefix + name, _comparable(value)))
            if isinstance(value, torch.Tensor):
                tensors.append(value)
        for registry in ("_parameters", "_buffers", "_modules"):
            members = attributes[registry]
            slots.append((attributes, registry, members))
            sizes.append((members, len(members)))
            for name, value in members.items():
                slots.append((members, name, value))
                state.append((prefix + name, _comparable(value)))
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
        if path or own_hooks:  # else they run around the compiled call
            for name in _HOOKS:
                sizes.append((attributes[name], len(attributes[name])))
                state.append((prefix + name, len(attributes[name])))
                if hooked is None and attributes[name]:
                    hooked = path
    with torch._C.DisableTorchFunctionSubclass():
        requires_grad = any(tensor.requires_grad for tensor in tensors)
    return Watched(
        guard=Guard(slots, sizes, *_parted(tensors, written)),
        state=tuple(value for _, value in state),
        names=tuple(name for name, _ in state),
        training=training,
        hooked=hooked,
        requires_grad=requires_grad,
    )


def _parted(
    tensors: list[torch.Tensor], written: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    identities = {id(tensor) for tensor in written}
    return (
        [tensor for tensor in tensors if id(tensor) not in identities],
        [tensor for tensor in tensors if id(tensor) in identities],
    )


@functools.cache
def _heeds_training(cls: type[nn.Module]) -> bool:
    """Whether a submodule in training mode computes something else; layers like Linear do not.

    A fresh layer is in training mode, and one that was put into a model in place of another often
    stays so. Only PyTorch's own layers are believed to say where they look at the mode.
    """
    if not cls.__module__.startswith("torch.nn.modules."):
        return True
    return any(
        "training" in member.__code__.co_names
        for base in cls.__mro__[: cls.__mro__.index(nn.Module)]
        for member in vars(base).values()
        if inspect.isfunction(member)
    )


class _ByWeakIdentity:
    """A tensor that compares by identity and is not kept alive."""

    __slots__ = ("_hash", "_reference")

    def __init__(self, value: torch.Tensor) -> None:
        self._hash = id(value)
        self._reference = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        value = self._reference()
        return self is other or (
            isinstance(other, _ByWeakIdentity) and value is not None and other._reference() is value
        )

    def __hash__(self) -> int:
        return self._hash


def _comparable(value: Any) -> Hashable:
    # Values that cannot be edited in place compare by value, so that assigning an equal one
    # does not cost a capture; 1, 1.0 and True are told apart.
    if isinstance(value, _BY_VALUE):
        return type(value), value
    if isinstance(value, torch.Tensor):
        # What a subclass answers may be code of its own, and a nested tensor has no shape.
        if type(value) not in (torch.Tensor, nn.Parameter) or value.is_nested:
            return _ByWeakIdentity(value)
        # New values are new weights; another shape, dtype or device is another program, and what
        # compiled code cannot read is none.
        attributes = value.dtype, value.device, value.requires_grad, unreadable_kind(value)
        return tuple(value.shape), *attributes
    if type(value) is tuple:
        return tuple(_comparable(item) for item in value)
    return _ByIdentity(value)
