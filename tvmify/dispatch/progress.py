"""The stages of a miss: their durations, and a progress line on the terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from types import TracebackType
from typing import Any, TextIO, cast

from typing_extensions import Self

from tvmify.artifact.stages import Stage
from tvmify.system import forks
from tvmify.system.signals import HeldSignals, handle_signals

_LOG = logging.getLogger(__name__)


class _Screen:
    """Standard error without its errors: a terminal that was closed must not fail a call."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


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
        self.seconds: dict[Stage, float] = {}
        self.subject = subject
        self._visible = visible
        self._display: Any = None
        self._spinner: Any = None
        self._stage: tuple[Stage, float] | None = None
        self._signals = HeldSignals()

    def begin(self, name: Stage) -> None:
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
        if self._display is not None:
            self._spinner.update(text=text)
            return
        # Imported here, since a process without a display does not need it.
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        screen = None if sys.stderr is None else cast("TextIO", _Screen(sys.stderr))
        self._spinner = Spinner("dots", text)
        # What other threads print goes where it belongs, such as to a file.
        self._display = Live(
            self._spinner,
            console=Console(file=screen, stderr=True),
            refresh_per_second=12.5,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._display.start()

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
        if self._display is not None:
            self._display.stop()
        self._signals.__exit__(kind, error, trace)
