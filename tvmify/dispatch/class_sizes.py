"""Example sizes for each class of sizes that has its own program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from tvmify.dispatch.examples import Example, example_arguments
from tvmify.dispatch.hints import CLASSES
from tvmify.torch_compat.declared_sizes import DeclaredSize


def example_calls(signature: Any, dtype: torch.dtype, device: torch.device) -> list[Example]:
    """Return calls from a signature given to ``warmup``: one for each class of sizes.

    Parameters and errors are those of `example_arguments`.
    """
    make = partial(example_arguments, signature, dtype, device)
    found = make()
    return [make(sizes) for sizes in sizes_of_classes(found.dims)] if found.dims else [found]


def sizes_of_classes(dims: Sequence[DeclaredSize]) -> list[tuple[int, ...]]:
    """Return sizes within limits: one set for each class that has sizes within them.

    Parameters
    ----------
    dims
        Sizes that may vary.

    Returns
    -------
    list of tuple of int
        Each tuple has a size for each of ``dims``.
    """
    found: list[tuple[int, ...]] = []
    least = 1
    for most, hint in CLASSES:
        # What its program is tuned for, or else the smallest.
        tried = (_at_least(product, dims) for product in (hint, least))
        sizes = next((sizes for sizes in tried if least <= prod(sizes) <= most), None)
        if sizes is not None:
            found.append(sizes)
        least = most + 1
    return found


def _at_least(product: int, dims: Sequence[DeclaredSize]) -> tuple[int, ...]:
    """Return sizes with about this product, or a larger one if need be; grow the last first."""
    sizes = [dim.least for dim in dims]
    for place in reversed(range(len(sizes))):
        others = prod(sizes[:place]) * prod(sizes[place + 1 :])
        wanted = -(-product // others)
        sizes[place] = min(max(sizes[place], wanted), dims[place].most)
    return tuple(sizes)
