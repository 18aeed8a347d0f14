"""How much of their time calls may spend on capturing what is built in the background."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from tvmify.system import forks

#: Of the time that passes, and seconds that may be saved up.
SHARE, MOST = 0.2, 2.0


class Allowance:
    """Seconds of this process that grow with time, and are spent by one thread at a time.

    What has begun is finished: there may be less than nothing left afterwards.

    Parameters
    ----------
    share, most
        How fast they grow, and to how many: that many there are at first.
    """

    def __init__(self, share: float = SHARE, most: float = MOST) -> None:
        self._share, self._most = share, most
        self._left, self._since = most, time.monotonic()
        self._spending = forks.Lock()

    def has_room(self) -> bool:
        """Whether `spend` would begin, as far as it depends on the time that was spent."""
        now = time.monotonic()
        self._left = min(self._most, self._left + self._share * (now - self._since))
        self._since = now
        return self._left > 0

    @contextlib.contextmanager
    def spend(self, *, at_once: bool = True) -> Iterator[bool]:
        """Count the time in here: all of it where a call waits, else the processor's.

        Parameters
        ----------
        at_once
            Do not wait for another thread, and begin only if there is something left.

        Yields
        ------
        bool
            False if it may not begin; nothing is counted then.
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


#: The one of this process.
allowance = Allowance()
