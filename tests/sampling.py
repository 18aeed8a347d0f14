"""Which cases of a test run where there is no time for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256


def sample(names: Iterable[str], step: int) -> set[str]:
    """Return one in `step` of the cases of each test, rounded up.

    Parameters
    ----------
    names
        Node ids of pytest: cases of a test differ in what follows ``[``.

    Notes
    -----
    The cases with the smallest digests: the same in every process, and a mixture where a test
    combines several parameters.
    """
    tests: dict[str, list[str]] = {}
    for name in names:
        tests.setdefault(name.partition("[")[0], []).append(name)
    kept: set[str] = set()
    for cases in tests.values():
        cases.sort(key=lambda case: sha256(case.encode()).digest())
        kept.update(cases[: -(-len(cases) // step)])
    return kept
