"""The selection of cases if there is no time to run all of them."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256


def sample(names: Iterable[str], step: int) -> set[str]:
    """Return one in `step` of the cases of each test, rounded up.

    Parameters
    ----------
    names
        Node ids of pytest: cases of a test differ after the ``[``.

    Notes
    -----
    The cases with the smallest digests are selected: this is the same in every process, and gives a
    mixture if a test combines several parameters.
    """
    tests: dict[str, list[str]] = {}
    for name in names:
        tests.setdefault(name.partition("[")[0], []).append(name)
    kept: set[str] = set()
    for cases in tests.values():
        cases.sort(key=lambda case: sha256(case.encode()).digest())
        kept.update(cases[: -(-len(cases) // step)])
    return kept
