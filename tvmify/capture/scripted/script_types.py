"""Makes TorchScript distinguish module types that it would confuse. ``torch.jit.script`` compiles a
class once, and again for objects whose attributes have other types. It overlooks two differences:
the order of submodules, which a Sequential calls in turn, and a method of the class that was
replaced in the meantime.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import nn

_CONSTANT = "_tvmify_type"
_versions: weakref.WeakKeyDictionary[type, tuple[dict[str, Any], int]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def distinguish(module: nn.Module) -> None:
    """Give each module of a twin a constant that differs where its type must differ."""
    for part in module.modules():
        if not isinstance(part, torch.jit.ScriptModule):
            constants = (*getattr(part, "__constants__", ()), _CONSTANT)
            names = " ".join(part._modules)
            vars(part)["__constants__"] = constants
            vars(part)[_CONSTANT] = f"{_version(type(part))}: {names}"


def _version(cls: type[nn.Module]) -> int:
    """Return a number that changes when a method of a class is replaced."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    # keys of the class itself come last, since they take precedence
    members = {name: member for base in reversed(bases) for name, member in vars(base).items()}
    known = _versions.get(cls)
    if known is None or not _same(known[0], members):
        known = _versions[cls] = members, next(_numbers)
    return known[1]


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return before.keys() == now.keys() and all(now[name] is before[name] for name in now)
