"""Finds where a view lies in a tensor of any strides.

A stride of a view is a sum of multiples of its base's strides, and so is its offset, unless its
operators join axes. The multiples are found by repeating the operators on fake tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from tvmify.artifact.expressions import Size, Term
from tvmify.artifact.geometry import Geometry, base_stride
from tvmify.artifact.recorded_shapes import size_of
from tvmify.torch_compat.symbols import identity_of

#: Strides of a tensor whose axes nothing can join: primes, far above the sizes of a view's parts.
_PRIMES = (1000003, 1000033, 1000037, 1000039, 1000081, 1000099, 1000117, 1000121)


def geometry_in(
    lineage: Sequence[fx.Node], names: Mapping[str, str], sizes: tuple[Size, ...]
) -> Geometry | None:
    """Return where a view lies, in terms of the strides of its base; None if it is a view for some
    strides only.

    Parameters
    ----------
    lineage
        The view, what that is a view of, and so on to the base.
    names
        See `tvmify.artifact.recorded_shapes.symbol_names`.
    sizes
        Those of the view.
    """
    *operators, base = lineage
    rank = base.meta["val"].dim()
    if not 0 < rank <= len(_PRIMES):
        return None
    chain = operators[::-1]
    with _without_guards(base):
        units = [[int(i == axis) for i in range(rank)] for axis in range(rank)]
        try:
            of_primes = _lying(chain, base, _PRIMES[:rank])
            unit = [_lying(chain, base, strides) for strides in units]
        except Exception:  # of any kind: the operator refuses such strides
            return None
        # Multiples of each number of `of_primes`, by axis of the base.
        multiples = list(zip(*unit, strict=True))
        for number, parts in zip(of_primes, multiples, strict=True):
            found = sum(identity_of(m) * s for m, s in zip(parts, _PRIMES, strict=False))
            if sympy.expand(found - identity_of(number)) != 0:
                return None
        *strides, offset = (_sum([size_of(m, names) for m in parts]) for parts in multiples)
    return Geometry(sizes, tuple(strides), offset)


def _lying(chain: list[fx.Node], base: fx.Node, strides: Sequence[int]) -> list[Any]:
    """Return the strides and the offset of the view of a tensor with these strides."""
    whole = base.meta["val"]
    probe = torch.empty_strided(whole.shape, strides, dtype=whole.dtype, device=whole.device)
    values: dict[fx.Node, Any] = {base: probe}

    def value(node: fx.Node) -> Any:
        return values[node] if node in values else node.meta["val"]

    for node in chain:
        taken: Callable[..., Any] = node.target  # type: ignore[assignment]
        values[node] = taken(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))
    view = values[chain[-1]]
    return [*view.stride(), view.storage_offset()]


@contextlib.contextmanager
def _without_guards(base: fx.Node) -> Iterator[None]:
    mode = base.meta["val"].fake_mode
    environment = mode.shape_env
    silent = contextlib.nullcontext() if environment is None else environment.suppress_guards()
    with mode, silent:
        yield


def _sum(multiples: list[Size]) -> Size:
    """Return the sum of multiples of the base's strides."""
    terms: list[Size] = []
    for axis, multiple in enumerate(multiples):
        if multiple != 0:
            stride = base_stride(axis)
            terms.append(stride if multiple == 1 else Term("*", (multiple, stride)))
    if len(terms) < 2:
        return terms[0] if terms else 0
    return Term("+", tuple(terms))
