"""Refuses a forward that does more than compute: it prints, logs, or changes what outlives a call.

A program holds operators alone. Recording would do the rest once, and no later call would.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import logging
import sys
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from tvmify.capture.questions import Reached, reached
from tvmify.errors import HasEffects

#: Their logs are about themselves, and mostly appear once; what they change are caches.
_LIBRARIES = frozenset(
    "torch torchvision transformers timm diffusers accelerate peft sentence_transformers "
    "huggingface_hub lightning pytorch_lightning einops einx opt_einsum beartype jaxtyping "
    "tvmify".split()
)
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
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


@contextlib.contextmanager
def refusing_effects(callable_: Any) -> Iterator[None]:
    """Refuse side effects of code that is recorded meanwhile, and undo them; use inside `tracing`.

    Parameters
    ----------
    callable_
        The module or function that is recorded.

    Raises
    ------
    HasEffects
        It prints or logs, or has changed a variable, a container or an object that it did not make.
    """
    places = list(_places(callable_))
    refused: list[HasEffects] = []
    try:
        with _refusing_output(refused):
            yield
    finally:
        changed = [place.name for place in places if place.put_back()]
    if refused:  # and something has caught the error
        raise refused[0]
    if changed:
        raise HasEffects(f"forward changes {changed[0]!r}, which outlives the call", may_cease=True)


# ------------------------------------------------------------------------------ prints and logs


@contextlib.contextmanager
def _refusing_output(refused: list[HasEffects]) -> Iterator[None]:
    """Refuse what this thread prints and logs; adds the refusals to a list."""
    thread = threading.get_ident()
    own_print, own_handle = builtins.print, logging.Logger.handle

    def refuse(what: str) -> None:
        refused.append(HasEffects(f"forward {what} ({_caller()})"))
        raise refused[-1]

    def printing(*values: Any, **how: Any) -> None:
        if threading.get_ident() == thread and not _is_of_library(sys._getframe(1)):
            refuse("prints")
        own_print(*values, **how)

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        is_here = threading.get_ident() == thread
        if is_here and _package(record.name) not in _LIBRARIES:
            refuse("logs")
        own_handle(logger, record)

    builtins.print, logging.Logger.handle = printing, handle  # type: ignore[method-assign]
    try:
        yield
    finally:
        builtins.print, logging.Logger.handle = own_print, own_handle  # type: ignore[method-assign]


def _is_of_library(frame: types.FrameType) -> bool:
    return _package(frame.f_globals.get("__name__")) in _LIBRARIES


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _caller() -> str:
    """Return the line of the user's code that prints or logs."""
    frame: types.FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__") == "logging":
        frame = frame.f_back
    return "no source known" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


# --------------------------------------------------------------------- what outlives the call


class _Place(NamedTuple):
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
    ) -> _Place:
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


def _places(callable_: Any) -> Iterator[_Place]:
    """Yield what the code of a module or function refers to and may change."""
    seen = {id(sys.modules)}
    for function in reached(callable_):
        if _package(function.function.__module__) in _LIBRARIES | sys.stdlib_module_names:
            continue
        yield from _variables(function)
        for name, value in function.values:
            if id(value) not in seen and (place := _place_of(name, value)) is not None:
                seen.add(id(value))
                yield place


def _variables(function: Reached) -> Iterator[_Place]:
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


def _variable(name: str, variables: dict[str, Any]) -> _Place:
    return _Place.of(
        name, lambda: [variables[name]], lambda before: variables.update({name: before[0]})
    )


def _cell(name: str, cell: types.CellType) -> _Place:
    def write(before: list[Any]) -> None:
        (cell.cell_contents,) = before

    return _Place.of(name, lambda: [cell.cell_contents], write)


def _place_of(name: str, value: Any) -> _Place | None:
    if type(value) in _CONTAINERS:
        return _container(name, value)
    attributes = getattr(value, "__dict__", None)
    # Torch's own objects keep the state of one call, such as that of `@torch.autocast("cpu")`.
    is_torchs = _package(type(value).__module__) == "torch"
    is_object = type(attributes) is dict and not (is_torchs or isinstance(value, _NO_OBJECTS))
    return _container(name, attributes) if is_object else None


def _container(name: str, container: Any) -> _Place:
    is_dict = isinstance(container, dict)

    def read() -> list[Any]:
        return list(container.items() if is_dict else container)

    def write(before: list[Any]) -> None:
        # Other threads may use it meanwhile: they never find it empty.
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

    return _Place.of(name, read, write)


def _restore_items(container: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in container.keys() - before.keys():
        container.pop(key, None)
    for key, value in before.items():  # the update of a Counter would add
        container[key] = value
    if list(container) != list(before):  # as after `move_to_end`
        for key in before:
            container[key] = container.pop(key)
