"""Classes decorated under their own name, with their eager forward beside them."""

from __future__ import annotations

from typing import Any

from torch import nn

from tvmify import tvmify


def eager(net: nn.Module, *args: Any) -> Any:
    return type(net).forward.__tvmify_eager__(net, *args)  # type: ignore[attr-defined]


def decorated(cls: type[nn.Module], **options: Any) -> Any:
    return tvmify(**options)(type(cls.__name__, (cls,), {"forward": cls.forward}))().eval()
