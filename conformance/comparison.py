"""Compares nested results with eager's, tensor by tensor; both are compared with float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.tolerances import SLACK, TIMES_EAGER

#: Leaves of a result besides tensors; anything else is a container or an object.
_LEAVES = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)

#: If eager's error is larger, the network computes something else in float64, and is not compared
#: with it.
_UNSOUND = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}


class Different(Exception):
    """A result differs from eager's; the message says where and how."""


@dataclass(frozen=True)
class Errors:
    """Relative errors of one tensor: the one where ours is largest.

    Attributes
    ----------
    ours, eager
        Largest error against float64, over the largest element.
    """

    ours: float = 0.0
    eager: float = 0.0


def compare(result: Any, eager: Any, exact: Any) -> Errors:
    """Compare a result with eager's, and both with eager's in float64.

    Parameters
    ----------
    exact
        The result in float64; if None, because the network cannot compute it, eager's is used.

    Raises
    ------
    Different
        Classes, attributes, lengths, shapes, dtypes or values differ; values of floats by more than
        `tests.tolerances` allows.
    """
    ours, theirs = list(_walk("result", result)), list(_walk("result", eager))
    for (path, got), (expected_path, want) in zip(ours, theirs, strict=False):
        if path != expected_path or type(got) is not type(want):
            raise Different(f"{path} is a {type(got)}; eager has a {type(want)} at {expected_path}")
        if not isinstance(got, Tensor) and got != want:
            raise Different(f"{path} is {got!r} where eager has {want!r}")
    if len(ours) != len(theirs):
        raise Different(f"the result has {len(ours)} parts where eager has {len(theirs)}")
    references = [part for _, part in _walk("result", eager if exact is None else exact)]
    worst = Errors()
    for (path, got), (_, want), reference in zip(ours, theirs, references, strict=True):
        if isinstance(got, Tensor):
            worst = max(worst, _compare(path, got, want, reference), key=lambda each: each.ours)
    return worst


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each part of a result; of containers and objects, the class."""
    if isinstance(value, (Tensor, type, *_LEAVES)):
        yield path, value
        return
    yield path, type(value)
    if isinstance(value, Mapping):
        yield f"{path}, attributes", str(sorted(getattr(value, "__dict__", ())))
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        items = [(f"{path}.{name}", item) for name, item in vars(value).items()]
    for inner, item in items:
        yield from _walk(inner, item)


def _compare(path: str, got: Tensor, want: Tensor, exact: Tensor) -> Errors:
    for name in ("dtype", "shape", "device"):
        ours, theirs = getattr(got, name), getattr(want, name)
        if ours != theirs:
            raise Different(f"{path} has {name} {ours}, in eager {theirs}")
    if want.is_complex():
        got, want, exact = (torch.view_as_real(z.resolve_conj()) for z in (got, want, exact))
    if not want.is_floating_point():
        if not torch.equal(got, want):
            raise Different(f"{path} has other values than in eager")
        return Errors()
    for name in ("isnan", "isposinf", "isneginf"):
        if not torch.equal(getattr(got, name)(), getattr(want, name)()):
            raise Different(f"{path}.{name}() is not eager's")
    finite = want.isfinite() & exact.isfinite()
    if not finite.any():
        return Errors()
    largest = _largest(exact[finite]) or 1.0
    errors = Errors(
        _largest((got.double() - exact)[finite]) / largest,
        _largest((want.double() - exact)[finite]) / largest,
    )
    if errors.eager > _UNSOUND[want.dtype]:
        raise Different(f"{path} has an error of {errors.eager:.2g} in eager: it says nothing")
    allowed = TIMES_EAGER[want.dtype] * errors.eager + SLACK[want.dtype]
    if errors.ours > allowed:
        raise Different(
            f"{path} has an error of {errors.ours:.2g}, allowed {allowed:.2g} "
            f"(eager {errors.eager:.2g})"
        )
    return errors


def _largest(values: Tensor) -> float:
    return values.abs().max().item()
