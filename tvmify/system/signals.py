"""Signals that arrive while a program is made are handled between two of its stages.

Python runs the handler of a signal wherever the main thread is. What it raises in a callback from
TVM comes out as an error of TVM's, as if the program could not be compiled; in an import of
PyTorch's it leaves half a module behind.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from typing_extensions import Self


class Interrupted(BaseException):
    """Leads out of the outermost `HeldSignals`, which raises what a handler has raised.

    No Exception: those are taken for reasons not to compile.
    """


class HeldSignals:
    """Holds back the handlers that Python has for signals, in the main thread.

    Of several contexts, one inside of the other, the outermost does it; other threads get no
    signals. A second SIGINT is handled at once.
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
            for number in signal.valid_signals():
                # Neither a default, nor one that was not set by Python.
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, self._hold)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if HeldSignals._outermost is not self:
            return
        HeldSignals._outermost = None
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._hold:  # else it was replaced meanwhile
                signal.signal(number, handler)
        if self._raised is not None and error is not self._raised:
            raise self._raised from None
        while self._pending:
            self._handle(*self._pending.popitem())

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._pending:
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
    """Handle the signals that are held back, if it is this thread that does so.

    Raises
    ------
    Interrupted
        A handler has raised something.
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
