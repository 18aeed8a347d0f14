"""Ignoring the warnings of one thread: `warnings.catch_warnings` does it to all of them."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator


class _Here:
    """Stands, in a filter, for the pattern of a message: matches whatever one thread says."""

    def __init__(self) -> None:
        self._thread: int | None = threading.get_ident()

    def match(self, message: str) -> bool:
        return self._thread == threading.get_ident()

    def end(self) -> None:
        # A filter may stay behind, in a list that another thread puts back later.
        self._thread = None

    def ends_with_a_fork(self) -> bool:
        return self._thread != threading.get_ident()


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Ignore the warnings of this thread."""
    here = _Here()
    entry = ("ignore", here, Warning, None, 0)
    warnings.filters.insert(0, entry)  # type: ignore[attr-defined]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        here.end()
        with contextlib.suppress(ValueError):  # another thread has put an earlier list back
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
        warnings._filters_mutated()  # type: ignore[attr-defined]


def _after_fork_in_child() -> None:
    # A new thread may well get the number of one that is gone.
    for entry in list(warnings.filters):
        if isinstance(entry[1], _Here) and entry[1].ends_with_a_fork():
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
    warnings._filters_mutated()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_after_fork_in_child)
