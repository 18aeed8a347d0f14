"""Named types of TorchScript: NamedTuples, and mangled names."""

from __future__ import annotations

import collections
import functools
import re
from typing import Any

import torch

_MANGLED = re.compile(r"___torch_mangle_\d+\.")


def demangled(name: str) -> str:
    """Remove the mangling of class names, which differs between processes."""
    return _MANGLED.sub("", name)


def field_names(type_: torch._C.JitType) -> tuple[str, ...] | None:
    """Return the fields of a NamedTuple type, or None for any other type."""
    text = str(type_)
    if type_.kind() != "TupleType" or not text.startswith("NamedTuple("):
        return None
    # the type has no accessor for its fields: read "NamedTuple(a : Tensor, b : (int, int)?)"
    depth, top = 0, []
    for character in text.removeprefix("NamedTuple("):
        depth += character in "([{"
        depth -= character in ")]}"
        if depth < 0:
            break
        top.append(character if depth == 0 else "")
    return tuple(part.partition(" : ")[0].strip() for part in "".join(top).split(",") if part)


def named_tuple_class(type_: torch._C.JitType) -> Any:
    """Return a class for the values of a NamedTuple type (as torch does), or None."""
    fields = field_names(type_)
    if fields is None:
        return None
    return _made(demangled(type_.annotation_str).rpartition(".")[2], fields)


@functools.cache
def _made(name: str, fields: tuple[str, ...]) -> Any:
    # cached, because pytrees of two classes never compare equal
    return collections.namedtuple(name, fields)
