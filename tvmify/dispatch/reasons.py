"""Errors that are kept as reasons, without the stack frames of the call that raised them."""

from __future__ import annotations

import traceback
from typing import TypeVar

Error = TypeVar("Error", bound=Exception)


class EarlierTraceback(Exception):
    """The traceback, as text, of an error that was raised earlier, perhaps in another thread."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def without_frames(error: Error) -> Error:
    """Return a caught error with its traceback as text, so that it can be kept.

    Stack frames would keep the arguments of the call and the program alive as long as the error,
    and errors of ``torch.export`` until the garbage collector finds their cycles.
    """
    if not isinstance(error.__cause__, EarlierTraceback):
        text = "".join(traceback.format_exception(error))
        linked: list[BaseException] = [error]
        for one in linked:
            traceback.clear_frames(one.__traceback__)
            others = (one.__cause__, one.__context__)
            linked += (other for other in others if other is not None and other not in linked)
        error.__cause__ = EarlierTraceback(text)
    error.__context__ = None
    return error.with_traceback(None)


def again(error: Error) -> Error:
    """Return a copy of a kept error to raise, so that the original gets no frames."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(vars(error))
    copy.__cause__ = error.__cause__
    return copy
