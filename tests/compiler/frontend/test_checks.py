"""Checks of values raise in every call, although nothing in a program reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.pytorch import IS_2_11
from tvmify import tvmify as decorate


def asserted(x: torch.Tensor) -> Any:
    torch._assert_async((x > 0).all(), "not positive")
    return x.view(-1), x.exp()


def checked(x: torch.Tensor) -> Any:
    torch._check_tensor_all(x > 0, lambda: "not positive")
    torch._assert_async((x < 9).any())
    return {"it": x, "exp": x.exp()}


#: PyTorch 2.11 does not record the checks of the second.
CHECKED = [asserted] if IS_2_11 else [asserted, checked]


@pytest.mark.parametrize("function", CHECKED)
def test_a_failing_check_raises_the_same_error_as_eager(
    function: Callable[..., Any], inference: None
) -> None:
    fast = decorate(function, strict=True)
    x = torch.rand(2, 3) + 1
    fast(x)
    torch.testing.assert_close(fast(x + 1), function(x + 1))
    for wrong in (-x, x + 9):
        try:
            expected = function(wrong)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=str(error)):
                fast(wrong)
        else:
            torch.testing.assert_close(fast(wrong), expected)
    torch.testing.assert_close(fast(x), function(x))
    assert fast.cache_info().misses == 1


def test_a_check_of_a_value_that_is_not_computed_runs_in_eager(inference: None) -> None:
    def only(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > 0).all(), "not positive")
        return x

    fast = decorate(only)
    with pytest.warns(match="nothing that it computes is returned"):
        fast(torch.ones(2))
    with pytest.raises(RuntimeError, match="not positive"):
        fast(-torch.ones(2))
