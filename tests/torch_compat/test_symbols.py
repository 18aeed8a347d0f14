"""Sizes of tensors are numbers for recorded code, and stay symbols if possible."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tvmify import tvmify
from tvmify.torch_compat.symbols import python_numbers

ANY_LENGTH: dict[str, Callable[..., Any]] = {
    "reshape": lambda x, **_: (x * 2).reshape(len(x), 2, 2).transpose(1, 2),
    "arange": lambda x, **_: x + torch.arange(len(x)).unsqueeze(1),
    "mean": lambda x, **_: x.sum(0) / len(x),
    "max": lambda x, **_: x * max(len(x), 6),
    "result": lambda x, **_: (x * 2, len(x)),
    "isinstance": lambda x, **_: x * 2 if isinstance(len(x), int) else x * 3,
    "map": lambda x, **_: x * sum(map(len, (x, [1, 2]))),
    "truth": lambda x, **_: x * 2 if len(x) else x,
    "others": lambda x, **_: x * len("abc") * len(range(4)) * len({"a": 1}) * len(x.shape),
}
ONE_LENGTH: dict[str, Callable[..., Any]] = {
    "range": lambda x, **_: torch.stack([x[i] * i for i in range(len(x))]),
    "equal": lambda x, **_: x * 2 if len(x) == 3 else x * 3,
    "list": lambda x, **_: x * torch.tensor([0.5] * len(x)).unsqueeze(1),
    "slice": lambda x, **_: (x * 2, x.shape[: len(x)]),
    "dict": lambda x, **_: x * {3: 1.0, 5: 2.0, 8: 3.0}[len(x)],
    "format": lambda x, **_: x * float(f"{len(x)}"),
    "type": lambda x, **_: x * 2 if type(len(x)) is int else x * 3,
    "method": lambda x, **_: x * len(x).bit_length(),
    "reversed": lambda x, **_: torch.stack(list(reversed(x * 2))),
}


def check(function: Callable[..., Any]) -> int:
    """Compare calls of several lengths with eager; return the number of programs."""
    fast = tvmify(function, cache=False, compare=False)
    for size in (3, 5, 8):
        x = torch.randn(size, 4)
        torch.testing.assert_close(fast(x), function(x))
    assert fast.cache_info().eager == 0
    return fast.cache_info().builds


@pytest.mark.parametrize("name", ANY_LENGTH)
@torch.no_grad()
def test_a_program_serves_any_length(name: str) -> None:
    assert check(ANY_LENGTH[name]) == 2  # for the first length, and for any


@pytest.mark.parametrize("name", ONE_LENGTH)
@torch.no_grad()
def test_lengths_that_have_to_be_known(name: str) -> None:
    check(ONE_LENGTH[name])


def test_len_is_replaced_in_this_thread_and_for_tensors_only() -> None:
    own, found = builtins.len, []

    class Tensor(torch.Tensor):
        def __len__(self) -> Any:
            return "no number"  # noqa: PLE0303

    with python_numbers():
        assert len(torch.zeros(3, 2)) == 3
        assert len([1, 2]) == 2
        assert len(torch.zeros(2).as_subclass(Tensor)) == "no number"  # as if it were a symbol
        with pytest.raises(TypeError, match="0-d"):
            len(torch.zeros(()))
        with pytest.raises(TypeError, match="no len"):
            len(3)  # type: ignore[arg-type]

        def elsewhere() -> None:
            try:
                len(torch.zeros(2).as_subclass(Tensor))
            except TypeError as error:
                found.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert len(found) == 1
    assert builtins.len is own
