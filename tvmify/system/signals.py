"""Signals that arrive during a compilation are handled between two of its stages.

Python runs a signal handler wherever the main thread happens to be. An exception that it raises in
a callback from TVM comes out as an error of TVM's, as if the program could not be compiled; in an
import inside PyTorch it leaves a half-imported module behind.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from typing_extensions import Self


class Interrupted(BaseException):
    """Unwinds to the outermost `HeldSignals`, which raises the exception of a signal handler.

    A BaseException, because an Exception would count as a reason not to compile.
    """


class HeldSignals:
    """Defers Python's signal handlers, in the main thread.

    Of nested contexts, the outermost one does the work. Other threads receive no signals. A second
    SIGINT is handled at once.
    """

    _outermost: HeldSignals | None = None

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: dict[int, FrameType | None] = {}
        self._raised: BaseException | None = None

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if HeldSignals._outermost is None and is_main:
            HeldSignals._outermost = self
            try:
                for number in signal.valid_signals():
                    # Skip defaults, and handlers that were not set from Python.
                    if callable(handler := signal.getsignal(number)):
                        self._handlers[number] = handler
                        signal.signal(number, self._hold)
            except BaseException:  # of a handler that is not replaced yet
                self._restore()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if HeldSignals._outermost is not self:
            return
        try:
            self._restore()
        except BaseException as late:  # of a handler that is in place again
            self._raised = late
        while self._pending:
            try:
                self._handle(*self._pending.popitem())
            except BaseException as late:  # the other handlers run all the same
                self._raised = late
        if self._raised is not None and error is not self._raised:
            raise self._raised from None

    def _restore(self) -> None:
        HeldSignals._outermost = None
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._hold:  # keep a handler that was set since
                signal.signal(number, handler)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if HeldSignals._outermost is not self:  # an exception ended `_restore`
            self._handlers[number](number, frame)
        elif number == signal.SIGINT and number in self._pending:
            self._handle(number, self._pending.pop(number))
        else:
            self._pending[number] = frame

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            self._raised = error
            raise


def handle_signals() -> None:
    """Handle the deferred signals, if this is the thread that defers them.

    Raises
    ------
    Interrupted
        A handler has raised an exception.
    """
    held = HeldSignals._outermost
    if held is None or threading.current_thread() is not threading.main_thread():
        return
    try:
        while held._pending and held._raised is None:
            held._handle(*held._pending.popitem())
    except BaseException:
        raise Interrupted from None
    if held._raised is not None:
        raise Interrupted


def check_interrupted() -> None:
    """Raise if another library's error was caused by a signal handler.

    Raises
    ------
    Interrupted
        The handler of a second SIGINT has raised it, in the middle of a stage.
    """
    held = HeldSignals._outermost
    is_main = threading.current_thread() is threading.main_thread()
    if held is not None and is_main and held._raised is not None:
        raise Interrupted
