"""Subjects, and how their arguments are ordered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tvmify import tvmify as decorate
from tvmify.cache import Key
from tvmify.dispatch import load_or_build
from tvmify.dispatch.subject import Name

X, Y = torch.linspace(-1, 1, 12).reshape(3, 4), torch.ones(3, 4)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x) * mask * scale


class MaskedInAnyWay(Masked):
    def forward(self, x, *, mask, **rest):  # type: ignore[no-untyped-def, override]
        return self.layer(x) * mask * rest.get("scale", 1.0)


def masked(x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return torch.relu(x) * mask * scale


SUBJECTS: dict[str, Any] = {
    "module": Masked,
    "with any keywords": MaskedInAnyWay,
    "scripted": lambda: torch.jit.script(Masked().eval()),
    "function": lambda: masked,
}


def made(name: str, **options: Any) -> tuple[Any, Any]:
    """Return a decorated subject, and a plain one."""
    plain = SUBJECTS[name]()
    plain = plain.eval() if isinstance(plain, nn.Module) else plain
    return decorate(plain, strict=True, **options), plain


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_order_of_keywords_is_the_callers(name: str) -> None:
    fast, plain = made(name, cache=False)
    with torch.no_grad():
        expected = plain(X, Y, 2.0) if name != "with any keywords" else plain(X, mask=Y, scale=2.0)
        for _ in range(2):
            torch.testing.assert_close(fast(x=X, mask=Y, scale=2.0), expected)
            torch.testing.assert_close(fast(scale=2.0, mask=Y, x=X), expected)
            torch.testing.assert_close(fast(mask=Y, x=X, scale=2.0), expected)
    info = fast.cache_info()
    assert (info.misses, info.builds, info.hits) == (1, 1, 5)


def test_another_order_has_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Key] = []
    monkeypatch.setattr(load_or_build, "_log_key", lambda key, _: keys.append(key))
    with torch.no_grad():
        made("module")[0](x=X, mask=Y)
        made("module")[0](mask=Y, x=X)
        made("module")[0].warmup({"mask": (3, 4), "x": (3, 4)})
    assert len(keys) == 3 and len({key.digest for key in keys}) == 1


def test_the_order_of_other_keywords_is_forwards_to_see() -> None:
    def joined(**parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part * 2 for part in parts.values()])

    fast = decorate(joined, cache=False)
    for _ in range(2):
        torch.testing.assert_close(fast(a=X, b=Y), torch.cat([X, Y]) * 2)
        torch.testing.assert_close(fast(b=Y, a=X), torch.cat([Y, X]) * 2)
    assert fast.cache_info().misses == 2


def test_varying_sizes_are_compared_per_argument() -> None:
    class Added(nn.Module):
        def forward(self, long: torch.Tensor, short: torch.Tensor) -> torch.Tensor:
            return long.sum(0) + short.relu()

    fast: Any = decorate(Added().eval(), cache=False)
    fast.warmup({"short": (4,), "long": (torch.export.Dim("rows", max=64), 4)})
    builds = fast.cache_info().builds
    for rows in (2, 5, 9):
        x = torch.ones(rows, 4)
        torch.testing.assert_close(fast(short=Y[0], long=x), x.sum(0) + 1)
    assert fast.cache_info().builds == builds


def test_saved_files_accept_keywords_in_any_order(tmp_path: Any) -> None:
    fast, plain = made("module")
    with torch.no_grad():
        tvmify.save(fast, tmp_path / "net.pt", example_inputs={"mask": Y, "x": X}, strict=True)
        loaded = tvmify.load(tmp_path / "net.pt")
        expected = plain(X, Y)
        torch.testing.assert_close(loaded(mask=Y, x=X), expected)
        torch.testing.assert_close(loaded(x=X, mask=Y), expected)


def test_names_are_distinct_and_readable() -> None:
    net, encode = Name("Net", "forward"), Name("Net", "encode")
    assert [str(name) for name in (Name("double"), net, encode)] == ["double", "Net", "Net.encode"]
    with_cache = replace(encode.submodule("inner.lm"), with_cache=True)
    assert str(with_cache) == "Net.encode.inner.lm with a cache"
    assert str(with_cache.numbered(2)) == "Net.encode.inner.lm with a cache, region 2"
    assert Name("Net.encode", "forward") != encode
