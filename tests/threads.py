"""Calls in several threads at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator


@contextlib.contextmanager
def running(calls: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Make each call in its own thread while the body runs, and wait for all.

    Raises
    ------
    BaseException
        The error of the first call that failed.
    """
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()
    for error in errors:
        raise error


def together(calls: Iterable[Callable[[], object]]) -> None:
    """Make each call in its own thread, all at the same time; raises as `running` does."""
    with running(calls):
        pass
