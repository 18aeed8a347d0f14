"""Symbolic sizes of recorded programs, read without specializing them.

``int(size)``, a comparison, or a branch on one makes torch assume the value, or the answer, for the
whole program. What only looks at sizes reads them with these functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

#: The types of numbers that differ from call to call.
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_square_root = math.sqrt


def hint_of(size: int | torch.SymInt) -> int:
    """Return a size as it was in the call that was recorded."""
    return size.node.hint if isinstance(size, torch.SymInt) else int(size)


def identity_of(size: int | torch.SymInt) -> Any:
    """Return what is equal for sizes that are known to be equal in all calls."""
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
    """Return what ``math.sqrt`` does, which would make a number of a symbol."""
    return torch.sym_sqrt(number) if isinstance(number, SYMBOLS) else _square_root(number)
