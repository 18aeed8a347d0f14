"""Ignore the warnings of one thread; `warnings.catch_warnings` affects all threads."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator


class _Here:
    """Replaces the message pattern of a warnings filter: matches every message of one thread."""

    def __init__(self) -> None:
        self._thread: int | None = threading.get_ident()

    def match(self, message: str) -> bool:
        return self._thread == threading.get_ident()

    def end(self) -> None:
        # A filter may remain in a list that another thread restores later.
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
        with contextlib.suppress(ValueError):  # another thread has restored an earlier list
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
        warnings._filters_mutated()  # type: ignore[attr-defined]


def _after_fork_in_child() -> None:
    # A new thread may reuse the id of one that has ended.
    for entry in list(warnings.filters):
        if isinstance(entry[1], _Here) and entry[1].ends_with_a_fork():
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
    warnings._filters_mutated()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_after_fork_in_child)
