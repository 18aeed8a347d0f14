"""Functions that run in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tvmify.system.stack import large_stacks

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """Starts threads for each task, with large stacks.

    The executors of ``concurrent.futures`` refuse all work once the main thread has ended, although
    other threads may go on for days.

    Parameters
    ----------
    count
        The most threads at once.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return the results for all items; raise the error of the first one that has any."""
        todo = list(enumerate(items))
        errors: dict[int, BaseException] = {}
        results: list[Any] = [None] * len(todo)
        todo.reverse()

        def work() -> None:
            while todo and not errors:
                try:
                    place, item = todo.pop()
                except IndexError:  # another thread was faster
                    return
                try:
                    results[place] = function(item)
                except BaseException as error:
                    errors[place] = error

        threads = [threading.Thread(target=work) for _ in range(min(self._count, len(todo)))]
        started = []
        try:
            with large_stacks():
                for thread in threads:
                    thread.start()
                    started.append(thread)
        except RuntimeError:  # there may be no more threads
            todo.clear()
            raise
        finally:
            for thread in started:
                thread.join()
        if errors:
            raise errors[min(errors)]
        return results
