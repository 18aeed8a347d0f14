"""Symbolic sizes of recorded programs, read without specializing them.

``int(size)``, a comparison, or a branch on one makes torch assume the value, or the answer, for the
whole program. What only looks at sizes reads them with these functions.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import math
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

#: The types of numbers that differ from call to call.
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
#: What each is in eager.
_KINDS: tuple[tuple[Any, type], ...] = (
    (torch.SymInt, int),
    (torch.SymFloat, float),
    (torch.SymBool, bool),
)
#: Packages that know symbols.
_INSIDERS = frozenset({"torch", "tvmify", "sympy"})
_square_root = math.sqrt
_length = len


def hint_of(size: int | torch.SymInt) -> int:
    """Return a size as it was in the call that was recorded."""
    return size.node.hint if isinstance(size, torch.SymInt) else int(size)


def identity_of(size: int | torch.SymInt) -> Any:
    """Return a value that is equal for sizes that are known to be equal in all calls."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression) if expression.is_Integer else expression


def identities_of(sizes: Iterable[int | torch.SymInt]) -> tuple[Any, ...]:
    """Return `identity_of` each size of a shape."""
    return tuple(map(identity_of, sizes))


def is_symbolic(*tensors: torch.Tensor) -> bool:
    """Whether sizes of tensors differ from call to call."""
    sizes = (size for tensor in tensors for size in tensor.shape)
    return any(isinstance(size, torch.SymInt) and not size.node.expr.is_Integer for size in sizes)


def square_root(number: Any, /) -> Any:
    """Return what ``math.sqrt`` does, which would turn a symbol into a number."""
    return torch.sym_sqrt(number) if isinstance(number, SYMBOLS) else _square_root(number)


@contextlib.contextmanager
def python_numbers() -> Iterator[None]:
    """Let code that is recorded take symbols for Python's numbers, except torch's own.

    ``isinstance(size, int)`` is true, and ``f"{size}"`` is the value, which the program then
    assumes. ``len(tensor)`` is a symbol, which Python's own would turn into a number.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_symbolic_lengths())
        for symbol, kind in _KINDS:
            for name, attribute in _as_number(symbol, kind).items():
                stack.enter_context(_defined(symbol, name, attribute))
        yield


@contextlib.contextmanager
def _symbolic_lengths() -> Iterator[None]:
    """Let ``len`` return the symbol that is the first size of a tensor, in this thread.

    Code that asks for types gets a number, since ``type(symbol) is int`` is false.
    """
    thread, before = threading.get_ident(), builtins.len

    def length(value: Any, /) -> Any:
        kind = type(value)
        is_ours = issubclass(kind, torch.Tensor) and threading.get_ident() == thread
        if is_ours and "type" not in sys._getframe(1).f_code.co_names:
            return kind.__len__(value)
        return _length(value)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = before


def _as_number(symbol: Any, kind: type) -> dict[str, Any]:
    own_repr: Callable[[Any], str] = symbol.__repr__

    def as_class(_: Any) -> type:
        return kind if _is_asked_by_user() else symbol

    def as_repr(number: Any) -> str:
        return repr(kind(number)) if _is_asked_by_user() else own_repr(number)

    def as_format(number: Any, spec: str) -> str:
        return format(kind(number) if _is_asked_by_user() else own_repr(number), spec)

    return {"__class__": property(as_class), "__repr__": as_repr, "__format__": as_format}


def _is_asked_by_user() -> bool:
    """Whether it is the user's code that called the caller, also by way of Python's library."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in sys.stdlib_module_names:
            return package not in _INSIDERS
        frame = frame.f_back
    return False


@contextlib.contextmanager
def _defined(cls: type, name: str, value: Any) -> Iterator[None]:
    """Define an attribute of a class, ``__class__`` too, which its metaclass does not let set."""
    (attributes,) = gc.get_referents(vars(cls))
    before = attributes.get(name)
    attributes[name] = value
    _forget_lookups(cls)
    try:
        yield
    finally:
        if before is None:
            del attributes[name]
        else:
            attributes[name] = before
        _forget_lookups(cls)


def _forget_lookups(cls: Any) -> None:
    """Let Python look up the attributes of a class again."""
    cls._tvmify_changed = True
    del cls._tvmify_changed
