"""Arguments that are missing, None, or of another type than the default."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tvmify import tvmify as decorate


class Untyped(nn.Module):
    def forward(self, x, k=None):  # type: ignore[no-untyped-def]
        return x + 1 if k is None else (x + 1) * k


class Typed(nn.Module):
    def forward(self, x: torch.Tensor, k: torch.Tensor = None) -> torch.Tensor:  # type: ignore[assignment]
        return x + 1 if k is None else (x + 1) * k


class Two(nn.Module):
    def forward(self, x, mask=None, k=None):  # type: ignore[no-untyped-def]
        if mask is not None:
            x = x + mask
        return x + 1 if k is None else x * k


class IntegerForFloat(nn.Module):
    def forward(self, x: torch.Tensor, k: float = 2) -> torch.Tensor:
        return (x > 0).int() * k


class Switch(nn.Module):
    def forward(self, x, k=False):  # type: ignore[no-untyped-def]
        return x + 1 if k else x * 2


class Named(nn.Module):
    def forward(self, x, k=None):  # type: ignore[no-untyped-def]
        return torch.relu(x) if k == "relu" else x * 2


X = torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (Untyped, [(), (2.0,), (3,), (torch.ones(3),), (True,), (None,)]),
        (Typed, [(), (torch.ones(3),), (2.0,), (None,)]),
        (Two, [(), (X,), (X, 2.0), (None, X)]),
        (IntegerForFloat, [(), (2,), (2.0,)]),
        (Switch, [(), (True,), (False,), (1,)]),
        (Named, [(), ("relu",), (None,)]),
    ],
)
def test_optional_arguments_match_eager(cls: Any, given: list[Any]) -> None:
    plain = cls().eval()
    fast = decorate(plain, strict=True, cache=False)
    for args in given:
        torch.testing.assert_close(fast(X, *args), plain(X, *args))
        torch.testing.assert_close(fast(X, *args), plain(X, *args))
