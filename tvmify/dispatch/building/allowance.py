"""Limits the time that calls spend on captures for builds in the background."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from tvmify.system import forks

#: The share of elapsed time that calls may spend, and the most seconds that can accumulate.
SHARE, MOST = 0.2, 2.0


class Allowance:
    """A budget of seconds that refills with time, and that one thread at a time may spend.

    Work that has begun is finished, so the budget may become negative.

    Parameters
    ----------
    share
        Seconds that are added per second.
    most
        The largest budget, which is also the first.
    """

    def __init__(self, share: float = SHARE, most: float = MOST) -> None:
        self._share, self._most = share, most
        self._left, self._since = most, time.monotonic()
        self._spending = forks.Lock()

    def has_room(self) -> bool:
        """Whether any time is left."""
        now = time.monotonic()
        self._left = min(self._most, self._left + self._share * (now - self._since))
        self._since = now
        return self._left > 0

    @contextlib.contextmanager
    def spend(self, *, at_once: bool = True) -> Iterator[bool]:
        """Subtract the time that the body takes.

        Parameters
        ----------
        at_once
            A call waits for the body: do not wait for another thread, begin only if time is left,
            and count elapsed time. Otherwise count the processor time of this thread.

        Yields
        ------
        bool
            False if the body may not begin; then nothing is subtracted.
        """
        with self._spending.held(wait=not at_once) as is_held:
            if not is_held or (at_once and not self.has_room()):
                yield False
                return
            clock = time.monotonic if at_once else time.thread_time
            begun = clock()
            try:
                yield True
            finally:
                self._left -= clock() - begun


#: The allowance of this process.
allowance = Allowance()
