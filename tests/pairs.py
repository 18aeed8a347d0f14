"""Cases for tests whose parameters would be too many in every combination."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

_Parameter = type(pytest.param())


def pairs(*parameters: Sequence[Any]) -> list[Any]:
    """Return combinations in which any two values of two parameters meet at least once.

    Nearly all faults depend on two values at most, and few combinations have all the pairs. A value
    may be a `pytest.param`, whose marks its combinations keep.
    """

    def met(places: tuple[int, ...]) -> set[Any]:
        return set(combinations(enumerate(places), 2))

    everything = list(product(*(range(len(values)) for values in parameters)))
    missing = set().union(*map(met, everything))
    chosen = []
    while missing:
        best = max(everything, key=lambda places: len(missing & met(places)))
        missing -= met(best)
        chosen.append(best)
    return [
        _combined([values[i] for values, i in zip(parameters, places, strict=True)])
        for places in sorted(chosen)
    ]


def _combined(values: list[Any]) -> Any:
    given = [v if isinstance(v, _Parameter) else pytest.param(v) for v in values]
    return pytest.param(
        *(value for each in given for value in each.values),
        marks=[mark for each in given for mark in each.marks],
    )
