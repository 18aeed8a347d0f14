"""Sums, extrema, their positions, softmax, running sums."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.compiler.programs import check, check_each, with_specials


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (-1, -2), (0, 2)], ids=str)
def test_reductions_along_axes(axes: tuple[int, ...]):
    check_each(
        {
            "sum": lambda x: x.sum(axes),
            "mean": lambda x: x.mean(axes, keepdim=True),
            "amax": lambda x: x.amax(axes),
            "amin": lambda x: x.amin(axes, keepdim=True),
            "var": lambda x: x.var(axes),
            "std": lambda x: torch.std_mean(x, axes, correction=0),
            "norm": lambda x: torch.linalg.vector_norm(x, dim=axes),
            "logsumexp": lambda x: x.logsumexp(axes),
            "any": lambda x: (x > 1).any(axes[0]),
            "all": lambda x: (x > -1).all(axes[0], keepdim=True),
        },
        torch.randn(3, 20, 17),
    )


def test_reductions_of_everything():
    names = ("sum", "mean", "prod", "max", "min", "var", "argmax", "argmin", "any", "all")
    check_each({name: getattr(torch, name) for name in names}, torch.randn(5, 33))


@pytest.mark.parametrize(
    "shape", [(8, 8, 1, 3), (8, 8, 3, 1), (2, 8, 5, 1, 3), (1, 8, 1, 37)], ids=str
)
def test_reductions_of_rows_with_axes_of_one_element(shape: tuple[int, ...]):
    """Nothing beyond the end of a row is read if its length is not a multiple of the vector."""
    axes = [axis for axis in range(len(shape)) if axis != 1]
    check(lambda x: (x.sum(axes), x.amax(axes)), torch.randn(shape))


def test_mean_of_no_elements_is_nan():
    check(lambda x: (x.mean(), x.mean(1, keepdim=True), x.mean(0)), torch.ones(3, 0))


def test_any_and_all_over_no_axes_are_elementwise():
    check(lambda x: torch.any(x, []), torch.tensor([[0.0, 2.0], [-0.0, float("nan")]]))


def test_extrema_keep_nan_and_infinity():
    functions = {
        f"{name}_{axis}": partial(getattr(torch, name), dim=axis)
        for name in ("amax", "amin", "argmax", "argmin")
        for axis in (0, 1)
    }
    check_each(functions, with_specials(9, 40))
    check_each(functions, torch.full((4, 5), float("-inf")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.uint8])
def test_extrema_of_other_dtypes(dtype: torch.dtype):
    x = (torch.rand(9, 40) * 100).to(dtype)
    check_each({"max": lambda x: tuple(x.max(1)), "min": lambda x: tuple(x.min(0))}, x)


def test_the_first_of_equal_extrema_wins():
    x = torch.randint(0, 3, (6, 30))
    check_each({"max": lambda x: x.argmax(1, keepdim=True), "min": lambda x: x.argmin(0)}, x)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax_and_running_sums(axis: int):
    check_each(
        {
            "softmax": lambda x: x.softmax(axis),
            "large": lambda x: (x * 1000).softmax(axis),
            "log_softmax": lambda x: x.log_softmax(axis),
            "cumsum": lambda x: x.cumsum(axis),
            "cumprod": lambda x: x.cumprod(axis),
            "cumsum_of_bools": lambda x: (x > 0).cumsum(axis),
        },
        torch.randn(4, 6, 33),
    )


@pytest.mark.parametrize("shape", [(17,), (34,), (403,), (8, 5), (1, 17)], ids=str)
def test_norms_of_everything(shape: tuple[int, ...]):
    """Everything is one row, whose last vector is not full."""
    check_each(
        {
            "softmax": lambda x: x.flatten().softmax(0),
            "log_softmax": lambda x: x.flatten().log_softmax(0),
            "layer_norm": lambda x: torch.layer_norm(x, x.shape),
            "var": lambda x: x.var(),
        },
        torch.randn(shape),
    )


def test_softmax_of_specials():
    check(lambda x: (x.softmax(1), x.log_softmax(0)), with_specials(7, 22))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_summed_in_single(dtype: torch.dtype):
    x = torch.rand(8, 2000).to(dtype)
    check(lambda x: (x.sum(1), x.mean(1), x.softmax(1), x.var(1)), x)


def test_integers_are_summed_in_64_bits():
    x = torch.full((3, 100), 2**30, dtype=torch.int32)
    check(lambda x: (x.sum(1), x.sum(), (x > 0).sum(0), x.sum(1, dtype=torch.float32)), x)


def test_tensors_without_axes_and_without_elements():
    check(lambda x: (x.sum(), x.amax(), x.argmax(), x.softmax(0), x.cumsum(0)), torch.tensor(3.0))
    check(lambda x: (x.sum(0), x + 1, torch.cat([x, x + 1])), torch.randn(0, 3))
