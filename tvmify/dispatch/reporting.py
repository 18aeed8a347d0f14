"""Errors and warnings of a dispatcher; each warning appears once."""

from __future__ import annotations

import logging

from typing_extensions import TypeIs

from tvmify.dispatch import on_miss
from tvmify.dispatch.outcome import Eager
from tvmify.dispatch.reasons import again
from tvmify.dispatch.subject import Subject
from tvmify.errors import NotCompiled, NothingToCompute, Uninitialized, warn_once

_LOG = logging.getLogger(__name__)


class Reports:
    """Reports why calls of one module or function do not run compiled.

    Parameters
    ----------
    subject
        The module or function.
    """

    def __init__(self, subject: Subject) -> None:
        self._name, self._options = subject.name, subject.options
        self._is_part = subject.is_part
        self._warned: set[str] = set()

    def raise_if_required(self, outcome: Eager) -> None:
        """Raise the reason why a call cannot run compiled, if the options say so."""
        reason = outcome.reason
        if self._is_worth_saying(reason) and on_miss.must_raise(reason, self._options):
            raise again(reason)

    def warn(self, outcome: Eager) -> None:
        """Warn, once, why a call did not run compiled."""
        reason = outcome.reason
        # after an `Uninitialized` call, the next one may run compiled
        if self._is_worth_saying(reason) and not isinstance(reason, Uninitialized):
            message = f"{self._name} runs in eager PyTorch: {on_miss.warning_of(reason)}"
            if message not in self._warned:
                _LOG.info(message)  # TORCH_LOGS=tvmify shows it
            warn_once(self._warned, message)

    def _is_worth_saying(self, reason: NotCompiled | None) -> TypeIs[NotCompiled]:
        if reason is None or on_miss.is_awaited(reason):
            return False
        # the user cannot rewrite a part
        return not (self._is_part and isinstance(reason, NothingToCompute))

    def evictions(self, count: int) -> None:
        """Warn that signatures were evicted, if any were."""
        size = self._options.cache_size
        if count:
            warn_once(
                self._warned,
                f"{self._name} was called with more than cache_size={size} signatures: the least "
                f"recently used are evicted, and after {size} evictions, further ones run in eager "
                "PyTorch. Raise cache_size, unless there are many more.",
            )
