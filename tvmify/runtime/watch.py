"""What compiled code assumes about a module, and the native guard that detects changes.

A compiled program is valid for one state of its module: its attributes, submodules, modes and
hooks. Before every call, native code compares all of them by identity, at a few nanoseconds each.
It detects assignments to any attribute in the module, a new class of a submodule, and a new method
of a class, and edits of lists, dicts and sets that an attribute holds. It cannot detect what else
leaves identities unchanged: other objects edited in place, writes to ``tensor.data``, global
variables. Call ``refresh()`` after those.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy as is_uninitialized

from tvmify.runtime.identity import PLAIN, ByIdentity, ByWeakIdentity, contents
from tvmify.runtime.native import Guard
from tvmify.runtime.settings import settings_in
from tvmify.runtime.watched import EVERY_MODULE, Watched
from tvmify.signature import unreadable_kind
from tvmify.torch_compat.known_buffers import is_small
from tvmify.torch_compat.parts import Part, follows_parameters, parts, slots, trains

# Bookkeeping of nn.Module: the parts that matter (parameters, hooks …) are watched by name.
_BOOKKEEPING = frozenset(nn.Module().__dict__) - {"training"}
#: Prefix of the attributes that hold dispatchers, which are not part of the module's state.
DISPATCHER = "_tvmify_"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
#: PyTorch temporarily patches methods of nn.Module itself while it traces a module.
_UNWATCHED = frozenset(nn.Module.__mro__)
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def watch(
    module: nn.Module | None,
    constants: Sequence[torch.Tensor] = (),
    written: Sequence[torch.Tensor] = (),
    *,
    unwatched: Collection[str] = (),
    read: Collection[str] = (),
    own_hooks: bool = False,
) -> Watched:
    """Record a module's state, and create a guard for it.

    Parameters
    ----------
    module
        None for a function, which has no state.
    constants
        Tensors outside the module to guard as well.
    written
        Tensors of the module that its own calls write to. Calls read them afresh, so their elements
        may change.
    unwatched
        Dotted names of attributes, parameters and buffers that may change, if they hold no module.
    read
        Dotted names of small buffers whose values are part of the state.
    own_hooks
        Also watch the hooks of the module itself; those of its submodules are always watched.
    """
    watching = _Watching(constants, unwatched, read)
    for part in parts(module) if module is not None else ():
        watching.add(part, has_hooks=bool(part.path) or own_hooks)
    watching.add_hooks_of_all()
    return watching.result(written)


class _Watching:
    """Collects what `watch` returns."""

    def __init__(
        self,
        constants: Sequence[torch.Tensor],
        unwatched: Collection[str],
        read: Collection[str],
    ) -> None:
        self._slots: list[tuple[dict[Any, Any], Any, Any]] = []
        self._sizes: list[tuple[dict[Any, Any], int]] = []
        self._collections: list[tuple[Any, tuple[Any, ...]]] = []
        self._types: list[tuple[Any, type]] = []
        self._classes: dict[type, None] = {}
        self._tensors = list(constants)
        self._unwatched = unwatched
        self._read = read
        self._identities: dict[str, int] = {}
        self._state: list[tuple[str, Hashable]] = []
        self._aliases: dict[Hashable, int] = {}
        self._training: str | None = None
        self._hooked: str | None = None
        self._lazy: str | None = None
        self._slotted: str | None = None
        self._exported: list[str] = []

    def add(self, part: Part, *, has_hooks: bool) -> None:
        """Watch a module, without its children."""
        module = part.module
        self._add_mode(part)
        if isinstance(module, torch.jit.ScriptModule):
            self._add_script(part)
            return
        self._add_class(part)
        if self._slotted is None and (names := slots(type(module))):
            self._slotted = part.attribute(names[0])
        self._add_attributes(part)
        for registry in ("_parameters", "_buffers", "_modules"):
            self._add_registry(part, registry)
        if has_hooks:  # otherwise they run around the compiled call
            for name in _HOOKS:
                hooks = module.__dict__[name]
                self._slots.append((module.__dict__, name, hooks))
                self._add_hooks(part.attribute(name), hooks, part.path)

    def _add_mode(self, part: Part) -> None:
        module, path = part.module, part.path
        # eval() does not reach unregistered modules either, so capture sees the mode they have.
        if _is_exported(module):
            self._exported.append(part.attribute(""))
        is_fixed = f"{path}.".startswith(tuple(self._exported)) or _is_exported(module)
        is_training = trains(module) and part.is_registered and not is_fixed
        if self._training is None and is_training and (not path or _heeds_training(type(module))):
            self._training = path

    def _add_script(self, part: Part) -> None:
        # Its attributes are in C++, and each access makes a new Python object, so only its tensors
        # can be watched. Its children come later in this walk.
        own = dict(part.module.named_parameters(recurse=False))
        own |= dict(part.module.named_buffers(recurse=False))
        for name, value in own.items():
            self._add_value(part, name, value)
        self._state.append((part.attribute("training"), _comparable(trains(part.module))))

    def _add_attributes(self, part: Part) -> None:
        attributes = part.module.__dict__
        self._sizes.append((attributes, len(attributes)))
        for name, value in attributes.items():
            is_state = name not in _BOOKKEEPING and not name.startswith(DISPATCHER)
            is_state = is_state and not follows_parameters(part.module, name)
            if is_state and not self._may_change(part, name, value):
                self._slots.append((attributes, name, value))
                self._add_value(part, name, value)

    def _add_registry(self, part: Part, registry: str) -> None:
        attributes = part.module.__dict__
        members = attributes[registry]
        self._slots.append((attributes, registry, members))
        self._sizes.append((members, len(members)))
        for name, value in members.items():
            if not self._may_change(part, name, value):
                self._slots.append((members, name, value))
                self._add_value(part, name, value)

    def add_hooks_of_all(self) -> None:
        """Watch PyTorch's global module hooks."""
        for name in _HOOKS:
            hooks = getattr(nn.modules.module, f"_global{name}")
            self._add_hooks(name, hooks, EVERY_MODULE)

    def result(self, written: Sequence[torch.Tensor]) -> Watched:
        """Return what was watched."""
        with torch._C.DisableTorchFunctionSubclass():
            requires_grad = any(tensor.requires_grad for tensor in self._tensors)
        return Watched(
            guard=Guard(
                self._slots,
                self._sizes,
                *_parted(self._tensors, written),
                self._types,
                list(self._classes),
                self._collections,
            ),
            state=tuple(value for _, value in self._state),
            names=tuple(name for name, _ in self._state),
            training=self._training,
            hooked=self._hooked,
            requires_grad=requires_grad,
            identities=self._identities,
            lazy=self._lazy,
            slotted=self._slotted,
        )

    def _may_change(self, part: Part, name: str, value: Any) -> bool:
        is_structure = name == "training" or isinstance(value, nn.Module)
        return part.attribute(name) in self._unwatched and not is_structure

    def _add_class(self, part: Part) -> None:
        cls = type(part.module)
        # The root only weakly, since it owns the guard.
        held = part.module if part.path else weakref.ref(part.module)
        self._types.append((held, cls))
        self._state.append((part.attribute("__class__"), ByIdentity(cls)))
        for base in cls.__mro__:
            if base not in self._classes and base not in _UNWATCHED:
                self._classes[base] = None
                methods = ((n, v) for n, v in vars(base).items() if _is_method(v))
                name = f"methods of {base.__qualname__}"
                self._state.append((name, frozenset((n, ByIdentity(v)) for n, v in methods)))

    def _add_value(self, part: Part, name: str, value: Any) -> None:
        is_lazy = isinstance(value, torch.Tensor) and is_uninitialized(value)
        if is_lazy and self._lazy is None:
            self._lazy = part.attribute(name)
        comparable = "lazy" if is_lazy else _comparable(value)
        if isinstance(value, torch.Tensor):
            self._tensors.append(value)
            # A program may read either of two aliases, and tensors outside the module are its
            # constants.
            alias = self._aliases.setdefault(_memory_of(value), len(self._aliases))
            comparable = comparable, alias if part.is_named else ByIdentity(value)
            if part.attribute(name) in self._read and is_small(value):
                comparable = comparable, tuple(map(contents, value.flatten().tolist()))
        elif (settings := settings_in(value)) is not None:
            comparable = settings.value
            for collection in settings.collections:
                self._add_collection(collection)
        self._identities[part.attribute(name)] = id(value)
        self._state.append((part.attribute(name), comparable))

    def _add_collection(self, collection: Any) -> None:
        if isinstance(collection, dict):
            self._sizes.append((collection, len(collection)))
            self._slots += [(collection, name, value) for name, value in list(collection.items())]
        else:
            self._collections.append((collection, tuple(collection)))

    def _add_hooks(self, name: str, hooks: dict[Any, Any], place: str) -> None:
        self._sizes.append((hooks, len(hooks)))
        self._state.append((name, len(hooks)))
        if self._hooked is None and not all(map(_is_recorded, hooks.values())):
            self._hooked = place


def _is_recorded(hook: Any) -> bool:
    """Whether a hook needs no eager call: transformers adds one to each layer when a forward first
    asks for hidden states. They collect these for that forward alone, which a program records.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _parted(
    tensors: list[torch.Tensor], written: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    identities = {id(tensor) for tensor in written}
    return (
        [tensor for tensor in tensors if id(tensor) not in identities],
        [tensor for tensor in tensors if id(tensor) in identities],
    )


def _is_exported(module: nn.Module) -> bool:
    """Whether it is a ``torch.export`` program, whose modes are fixed."""
    return isinstance(module, torch.fx.GraphModule) and "eval" in vars(module)


@functools.cache
def _heeds_training(cls: type[nn.Module]) -> bool:
    """Whether training mode changes what a submodule computes; for layers like Linear it does not.

    A new layer is in training mode, and often stays so when it replaces another in a model. Only
    PyTorch's own layers and parametrizations are known to ignore the mode.
    """
    if not cls.__module__.startswith(("torch.nn.modules.", "torch.nn.utils.")):
        return True
    return any(
        "training" in member.__code__.co_names
        for base in cls.__mro__[: cls.__mro__.index(nn.Module)]
        for member in vars(base).values()
        if inspect.isfunction(member)
    )


def _is_method(member: Any) -> bool:
    """Whether a member of a class affects what its instances do; the guard ignores all others."""
    return callable(member) or hasattr(type(member), "__get__")


def _memory_of(tensor: torch.Tensor) -> Hashable:
    """Return a value that is equal for tensors with the same memory and layout."""
    is_dense = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    if not is_dense or not tensor.numel():
        return id(tensor)
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a tensor inside a function transform, or without memory
        return id(tensor)
    return (start, tensor.dtype, tensor.shape, tensor.stride()) if start else id(tensor)


def _comparable(value: Any) -> Hashable:
    # Immutable values compare by value, so that assigning an equal one does not cause a capture.
    if isinstance(value, PLAIN) and _is_hashable(value):
        return contents(value)
    if isinstance(value, torch.Tensor):
        # A subclass may override any of these, and a nested tensor has no shape.
        if type(value) not in (torch.Tensor, nn.Parameter) or value.is_nested:
            return ByWeakIdentity(value)
        # New values only need repacking; another shape, dtype or device needs another program, and
        # compiled code cannot run on a tensor that it cannot read.
        attributes = value.dtype, value.device, value.requires_grad, unreadable_kind(value)
        return tuple(value.shape), *attributes
    if type(value) is tuple:
        return tuple(_comparable(item) for item in value)
    return ByIdentity(value)


def _is_hashable(value: Any) -> bool:
    """Whether it has a hash, which a subclass of a plain type may refuse to have."""
    try:
        hash(value)
    except Exception:
        return False
    return True
