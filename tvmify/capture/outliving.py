"""What the code of a module or function refers to and may change: it outlives a call."""

from __future__ import annotations

import dis
import functools
import io
import itertools
import logging
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from tvmify.capture.questions import Reached, attributes_of, has_class, reached
from tvmify.errors import HasEffects

#: Their logs are about themselves, and mostly appear once; what they change are caches.
LIBRARIES = frozenset(
    "torch torchvision transformers timm diffusers accelerate peft sentence_transformers "
    "huggingface_hub lightning pytorch_lightning einops einx opt_einsum beartype jaxtyping "
    "tvmify".split()
)
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_HOLDERS = (dict, list, tuple, set, frozenset, deque, functools.partial, types.FunctionType)
_VALUES = (int, float, complex, str, bytes)
#: The parts of a module, whose changes are detected elsewhere.
_NO_OBJECTS = (
    torch.Tensor,
    torch.nn.Module,
    logging.Logger,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
)
#: Replace tensors and numbers while code is recorded.
_RECORDED = (FakeTensor, FunctionalTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
#: How many containers and objects are looked into, of how many items, and how large an array.
_MOST_PLACES, _MOST_BYTES = 4096, 2**20
_MISSING = object()


class Place(NamedTuple):
    """Something that code may change.

    Attributes
    ----------
    name
        What the code calls it.
    read
        Returns the current value.
    before
        What it returned.
    write
        Puts something there.
    """

    name: str
    read: Callable[[], list[Any]]
    before: list[Any]
    write: Callable[[list[Any]], None]

    @classmethod
    def of(
        cls, name: str, read: Callable[[], list[Any]], write: Callable[[list[Any]], None]
    ) -> Place:
        """Return the place with its current value."""
        return cls(name, read, read(), write)

    def put_back(self) -> bool:
        """Undo a change; return whether a call in eager would make one, too."""
        now = self.read()
        if _are_same(now, self.before):
            return False
        self.write(self.before)
        return not _are_same([item for item in now if not _is_of_recording(item)], self.before)


def _are_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(_is_same, now, before))


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(now, tuple) and isinstance(before, tuple):  # the key of a dict, and its value
        return _are_same(now, before)
    is_value = type(now) is type(before) and isinstance(now, _VALUES)
    return now is before or (is_value and now == before)


def _is_of_recording(item: Any) -> bool:
    """Whether it holds a type that only tensors and numbers of recordings have, as a cache does."""
    if isinstance(item, tuple):
        return any(map(_is_of_recording, item))
    return isinstance(item, type) and issubclass(item, _RECORDED)


def places_of(callable_: Any, recorded: Any) -> Iterator[Place]:
    """Yield what the code of a module or function refers to and may change.

    Parameters
    ----------
    callable_
        The module or function.
    recorded
        The module that stands for it while it is recorded.

    Raises
    ------
    HasEffects
        It refers to an iterator, which cannot be put back.
    """
    seen = {id(sys.modules)}
    for function in reached(callable_):
        if package_of(function.function.__module__) in LIBRARIES | sys.stdlib_module_names:
            continue
        yield from _variables(function)
        yield _container(function.function.__name__, vars(function.function))
        held = (*function.values, *_defaults(function.function))
        todo = [(name, value, True) for name, value in held]
        while todo and len(seen) < _MOST_PLACES:
            name, value, takes_objects = todo.pop()
            if not has_class(value) or isinstance(value, (type(None), *_VALUES)):
                continue
            if id(value) in seen:
                continue
            is_container = isinstance(value, _HOLDERS)
            if not (is_container or takes_objects):
                continue
            seen.add(id(value))
            if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
                raise HasEffects(f"forward refers to {name!r}, an iterator that it may advance")
            if (found := _place_of(name, value)) is not None:
                yield found
            # of an object, only its containers: others lead anywhere
            todo += [(name, item, takes_objects and is_container) for item in _items(value)]
    for module in (callable_, recorded):
        for part in module.modules() if isinstance(module, torch.nn.Module) else ():
            for cls in type(part).__mro__:
                if id(cls) not in seen and not _is_of_library(cls):
                    seen.add(id(cls))
                    yield _class(cls)


def package_of(module: str | None) -> str:
    """Return the first part of a module's name."""
    return (module or "").partition(".")[0]


def _is_of_library(value: Any) -> bool:
    cls = value if isinstance(value, type) else type(value)
    return package_of(cls.__module__) in LIBRARIES


def _items(value: Any) -> Iterable[Any]:
    """Return what a value holds and code may reach through it."""
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        items = value.values() if isinstance(value, dict) else value
        # A subclass may define other lengths, or none.
        items = list(itertools.islice(items, _MOST_PLACES + 1))
        return items if len(items) <= _MOST_PLACES else []
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        in_library = package_of(value.__module__) in LIBRARIES | sys.stdlib_module_names
        return [] if in_library else [item for _, item in _defaults(value)]
    if isinstance(value, _NO_OBJECTS) or _is_of_library(value):
        return []
    return attributes_of(value).values()


def _defaults(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the default values of parameters, which all calls share."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    yield from zip(names, values, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _variables(function: Reached) -> Iterator[Place]:
    """Yield the variables of other scopes that a function assigns to."""
    own: Any = function.function
    code, variables = own.__code__, own.__globals__
    stored = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
    for name in stored & variables.keys():
        yield _variable(name, variables)
    outer = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_DEREF"}
    cells = zip(code.co_freevars, own.__closure__ or (), strict=True)
    for name, cell in cells:
        if name in outer:
            yield _cell(name, cell)


def _variable(name: str, variables: dict[str, Any]) -> Place:
    return Place.of(
        name, lambda: [variables[name]], lambda before: variables.update({name: before[0]})
    )


def _cell(name: str, cell: types.CellType) -> Place:
    def write(before: list[Any]) -> None:
        (cell.cell_contents,) = before

    return Place.of(name, lambda: [cell.cell_contents], write)


def _place_of(name: str, value: Any) -> Place | None:
    if type(value) in _CONTAINERS:
        return _container(name, value)
    if isinstance(value, (*_NO_OBJECTS, *_VALUES, tuple)):
        return None
    # Torch's own objects keep the state of one call, such as that of `@torch.autocast("cpu")`.
    if package_of(type(value).__module__) == "torch":
        return None
    attributes = attributes_of(value)
    if type(attributes) is dict:
        return _container(name, attributes)
    return _slots(name, value) or _buffer(name, value)


def _slots(name: str, value: Any) -> Place | None:
    """Return the attributes of an object whose class has ``__slots__``."""
    slots = [slot for cls in type(value).__mro__ for slot in vars(cls).values()]
    slots = [slot for slot in slots if isinstance(slot, types.MemberDescriptorType)]
    if not slots or package_of(type(value).__module__) in sys.stdlib_module_names:
        return None

    def write(before: list[Any]) -> None:
        for slot, item in zip(slots, before, strict=True):
            if item is not _MISSING:
                slot.__set__(value, item)

    return Place.of(name, lambda: [_slot(value, slot) for slot in slots], write)


def _slot(value: Any, slot: types.MemberDescriptorType) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # not set
        return _MISSING


def _buffer(name: str, value: Any) -> Place | None:
    """Return the memory of an array, as those of NumPy."""
    try:
        memory = memoryview(value).cast("B")
    except (TypeError, ValueError):
        return None
    if memory.readonly or memory.nbytes > _MOST_BYTES:
        return None

    def write(before: list[Any]) -> None:
        (memory[:],) = before

    return Place.of(name, lambda: [bytes(memory)], write)


def _class(cls: type) -> Place:
    """Return the attributes of a class."""

    def read() -> list[Any]:
        names = [name for name in vars(cls) if name != "forward" and not name.startswith("__")]
        return [(name, vars(cls)[name]) for name in names]

    def write(before: list[Any]) -> None:
        kept = dict(before)
        for name, value in read():
            if name not in kept:
                delattr(cls, name)
            elif value is not kept[name]:
                setattr(cls, name, kept[name])

    return Place.of(cls.__name__, read, write)


def _container(name: str, container: Any) -> Place:
    is_dict = isinstance(container, dict)

    def read() -> list[Any]:
        return list(container.items() if is_dict else container)

    def write(before: list[Any]) -> None:
        # Other threads that use it never find it empty.
        if isinstance(container, list):
            container[:] = before
        elif is_dict:
            _restore_items(container, dict(before))
        elif isinstance(container, set):
            container.intersection_update(before)
            container.update(before)
        else:
            container.clear()
            container.extend(before)

    return Place.of(name, read, write)


def _restore_items(container: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in container.keys() - before.keys():
        container.pop(key, None)
    for key, value in before.items():  # the update of a Counter would add
        container[key] = value
    if list(container) != list(before):  # as after `move_to_end`
        for key in before:
            container[key] = container.pop(key)
