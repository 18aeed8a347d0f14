"""Transforms of ``torch.func`` that ``forward`` applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.pytorch import IS_2_11
from tests.tolerances import assert_close_to_reference
from tvmify import CaptureError, tvmify


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: self.inner(row).relu() * row.sum())(x)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "of a module": Batched().eval(),
    "twice": lambda x: torch.vmap(lambda a: torch.vmap(lambda b: (a * b).sum())(x))(x),
    "of columns": lambda x: torch.vmap(lambda v: v.softmax(0), in_dims=1)(x) + 1,
    "in chunks": lambda x: torch.vmap(lambda v: v.cumsum(0), chunk_size=2)(x) + 1,
    "of positions": lambda x: torch.vmap(lambda v: F.one_hot(v.argmax(), 4))(x) + 1,
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_vmap_is_compiled(name: str, mode: Callable[..., Any]) -> None:
    program = PROGRAMS[name]
    fast = tvmify(program, strict=True)
    with mode():
        for rows in (3, 5):
            x = torch.randn(rows, 4)
            assert_close_to_reference(fast(x), program, (x,))
    assert fast.cache_info().eager == 0


def test_vmap_in_a_region_with_another_grad_mode_is_compiled() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            doubled = torch.vmap(lambda v: v * 2)(x)
        return doubled + x

    x = torch.randn(3, 4)
    torch.testing.assert_close(tvmify(program, strict=True)(x), program(x))


def test_views_by_vmap_share_memory() -> None:
    fast = tvmify(lambda x: (torch.vmap(lambda v: v[1:])(x), x + 1), strict=True)
    x = torch.randn(3, 4)
    view, _ = fast(x)
    assert torch.equal(view, x[:, 1:])
    assert view.data_ptr() == x[:, 1:].data_ptr()


def test_random_numbers_in_vmap_are_those_of_eager() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda v: v + torch.rand(4), randomness="different")(x)

    fast, x = tvmify(program), torch.randn(3, 4)
    for call in (fast, fast):
        torch.manual_seed(1)
        got = call(x)
        torch.manual_seed(1)
        assert torch.equal(got, program(x))


def _under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.vmap(lambda v: v @ x.t())(x)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "writes": (lambda x: torch.vmap(lambda v: v.mul_(2))(x) + 1, "writes to or checks tensors"),
    "autocast": (_under_autocast, "under autocast"),
}
if not IS_2_11:  # it fails after recording, without a trace of why
    REFUSED |= {
        "gradient": (
            lambda x: torch.func.grad(lambda v: (v**3).sum())(x) + 1,
            "other than torch.vmap",
        ),
        "tangents": (lambda x: torch.func.jacfwd(lambda v: v**2)(x[0]), "torch.compile"),
    }


@pytest.mark.parametrize(("program", "words"), REFUSED.values(), ids=REFUSED)
@torch.no_grad()
def test_what_is_not_compiled_names_torch_compile(
    program: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"torch\.compile") as caught:
        tvmify(program, strict=True)(x)
    assert words in str(caught.value)
    with pytest.warns(match=r"torch\.compile"):
        got = tvmify(program)(x.clone())
    torch.testing.assert_close(got, program(x.clone()))
