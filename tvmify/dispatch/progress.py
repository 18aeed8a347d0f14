"""The stages of a miss: their durations, and a progress line on the terminal."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tvmify.system import forks
from tvmify.system.signals import HeldSignals, handle_signals

_LOG = logging.getLogger(__name__)


class Stages:
    """Times consecutive stages, and shows the current one.

    Forks and signal handlers wait until the thread is between two stages.

    Parameters
    ----------
    subject
        What is being compiled, for the display.
    visible
        Whether to show progress on standard error.

    Attributes
    ----------
    subject
        As given.
    seconds
        The duration of each finished stage, by name.
    threads
        How many threads the compiler may use; None for one per processor.
    """

    threads: int | None = None

    def __init__(self, subject: str, visible: bool) -> None:
        self.seconds: dict[str, float] = {}
        self.subject = subject
        self._visible = visible
        self._status: Any = None
        self._stage: tuple[str, float] | None = None
        self._signals = HeldSignals()

    def begin(self, name: str) -> None:
        """End the current stage, if there is one, and begin another."""
        self.end()
        handle_signals()
        forks.begin(self)
        self._stage = name, time.perf_counter()
        if self._visible:
            self._draw(f"tvmify: {self.subject}: {name} …")

    def end(self) -> None:
        """End the current stage, if there is one."""
        if self._stage is not None:
            name, begun = self._stage
            took = time.perf_counter() - begun
            self.seconds[name] = self.seconds.get(name, 0.0) + took
            self._stage = None
            forks.end(self)
            _LOG.debug("%s: stage %r took %.4f s", self.subject, name, took)

    def advance(self, done: int, total: int) -> None:
        """Show the progress of the current stage."""
        handle_signals()
        if self._visible and self._stage is not None:
            from rich.progress_bar import ProgressBar
            from rich.table import Table

            line = Table.grid(padding=(0, 1))
            bar = ProgressBar(total=total, completed=done, width=30)
            line.add_row(f"tvmify: {self.subject}: {self._stage[0]}", bar, f"{done}/{total}")
            self._draw(line)

    def _draw(self, text: Any) -> None:
        if self._status is None:
            # Imported here, since a process without a display does not need it.
            from rich.console import Console

            self._status = Console(stderr=True).status(text)
            self._status.start()
        else:
            self._status.update(text)

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        if self._status is not None:
            self._status.stop()
        self._signals.__exit__(kind, error, trace)
