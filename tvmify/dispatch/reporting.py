"""What a dispatcher says without being asked: an error, or a warning that appears once."""

from __future__ import annotations

import logging

from tvmify.dispatch import on_miss
from tvmify.dispatch.explanation import warn_once
from tvmify.dispatch.outcome import Eager
from tvmify.dispatch.reasons import again
from tvmify.dispatch.subject import Subject
from tvmify.errors import NothingToCompute, Uninitialized

_LOG = logging.getLogger(__name__)


class Reports:
    """What was said of one module or function.

    Parameters
    ----------
    subject
        The module or function.
    """

    def __init__(self, subject: Subject) -> None:
        self._name, self._options = subject.name, subject.options
        self._is_part = subject.is_part
        self._warned: set[str] = set()

    def eager(self, outcome: Eager) -> None:
        """Say why a call does not run compiled: an error if strict, else a warning, once."""
        reason = outcome.reason
        if reason is None or on_miss.is_awaited(reason):
            return
        if self._is_part and isinstance(reason, NothingToCompute):
            return  # nobody could write such a part in another way
        if on_miss.must_raise(reason, self._options):
            raise again(reason)
        if not isinstance(reason, Uninitialized):  # after which the next call runs compiled
            message = f"{self._name} runs in eager PyTorch: {on_miss.warning_of(reason)}"
            if message not in self._warned:
                _LOG.info(message)  # TORCH_LOGS=tvmify shows it
            warn_once(self._warned, message)

    def evictions(self, count: int) -> None:
        """Say that signatures had to leave, if some had to."""
        size = self._options.cache_size
        if count:
            warn_once(
                self._warned,
                f"{self._name} was called with more than cache_size={size} signatures: the least "
                f"recently used are evicted, and after {size} of them others run in eager PyTorch. "
                "Raise cache_size, if there are not many more.",
            )
