"""All tolerances of the tests. None is loosened to make a test pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

#: Compiled code may sum in another order than eager, so both are compared with float64: its largest
#: error is at most this many times eager's, plus `SLACK` of the largest output.
TIMES_EAGER = {torch.float64: 2.0, torch.float32: 2.0, torch.float16: 3.0, torch.bfloat16: 3.0}
SLACK = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

#: The accuracy policy (docs/accuracy.md), for one layer in float32: its largest error against
#: float64 is at most a multiple of eager's (the first number), or a fraction of the largest output
#: (the second), whichever is more. That fraction is one rounding for "strict", since eager may be
#: exact by luck.
POLICY = {"default": (5.0, 1.5e-6), "strict": (2.0, 2.0**-23)}


def assert_close_to_reference(
    actual: Any,
    module: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> None:
    """Compare a result with eager and with float64.

    Structure, shapes and dtypes equal eager's, as do integers, bools, NaN and infinity. The errors
    of floats against float64 are limited by `TIMES_EAGER` and `SLACK`.

    Parameters
    ----------
    actual
        The result of the compiled module; a pytree.
    module
        The module, or function, in eager.
    args, kwargs
        The arguments of the call.
    """
    kwargs = kwargs or {}
    with torch.no_grad():
        expected = module(*args, **kwargs)
        wide = copy.deepcopy(module)._apply(_widen) if isinstance(module, nn.Module) else module
        reference = wide(*_widen(args), **_widen(kwargs))
    actual_leaves, actual_structure = pytree.tree_flatten(actual)
    leaves, structure = pytree.tree_flatten(expected)
    assert actual_structure == structure
    for got, want, exact in zip(actual_leaves, leaves, pytree.tree_leaves(reference), strict=True):
        assert type(got) is type(want)
        if isinstance(want, torch.Tensor):
            _assert_tensor_close(got, want, exact)
        else:
            assert got == want


def _assert_tensor_close(got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.device == want.device
    if want.is_complex():
        got, want, exact = (torch.view_as_real(z.resolve_conj()) for z in (got, want, exact))
    if not want.is_floating_point():
        assert torch.equal(got, want)
        return
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isposinf(), want.isposinf())
    assert torch.equal(got.isneginf(), want.isneginf())
    finite = want.isfinite()
    if not finite.any():
        return
    error = (got - exact)[finite].abs().max().item()
    eager_error = (want - exact)[finite].abs().max().item()
    largest = exact[finite].abs().max().item()
    allowed = TIMES_EAGER[want.dtype] * eager_error + SLACK[want.dtype] * largest
    assert error <= allowed, (
        f"error {error:.3g} against float64, allowed {allowed:.3g} (eager {eager_error:.3g}, "
        f"largest output {largest:.3g})"
    )


def _widen(tree: Any) -> Any:
    def widen(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_complex():
            return leaf.to(torch.complex128)
        return leaf.double() if leaf.is_floating_point() else leaf

    return pytree.tree_map(widen, tree)
