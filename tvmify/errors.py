"""Every exception and warning of tvmify; each says what happened and what to do next."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Sequence

#: TorchScript's operator that sets an attribute of a module.
SET_ATTRIBUTE = "prim::SetAttr"


class TvmifyError(Exception):
    """Base class of every exception that tvmify raises itself."""


class OptionError(TvmifyError, ValueError):
    """An option does not exist, or its value is wrong; the message lists valid ones."""


class CacheError(TvmifyError):
    """A cache directory, archive or entry cannot be used; the message names it.

    Calls never raise it: a faulty cache is a warning, and programs are kept in memory. It comes
    from commands and functions that are about a cache. ``tvmify doctor`` says how to repair one.
    """


class NativeLibraryError(TvmifyError, ImportError):
    """The native library is missing, or was built for another torch or TVM: reinstall tvmify."""


class SaveError(TvmifyError, ValueError):
    """A module cannot be saved or exported; the message says why, and what to change."""


class ArchiveError(TvmifyError):
    """A file is not a saved module, is damaged, or was not signed with the given key.

    Save it again, or copy it again from where it is whole.
    """


class WarmUpError(TvmifyError, ValueError):
    """A signature given to `warmup` cannot be turned into tensors, or its method is not clear."""


class NotCompiled(TvmifyError):
    """Why a call runs in eager PyTorch instead of compiled code.

    With ``strict=False`` it is kept as the reason that ``explain()`` prints; there is one warning,
    and the call runs in eager. With ``strict=True`` it is raised.

    Parameters
    ----------
    reason
        What cannot be compiled, naming the operator, mode, tensor or device.
    next_step
        What the user can do about it, as a sentence.

    Examples
    --------
    >>> try:
    ...     tvmify(model, strict=True)(x)
    ... except tvmify.NotCompiled as error:
    ...     print(error.reason, error.next_step)
    """

    def __init__(self, reason: str, next_step: str) -> None:
        super().__init__(f"{reason}. {next_step}")
        self.reason = reason
        self.next_step = next_step

    @property
    def parts_may_compile(self) -> bool:
        """Whether parts of the program may be compiled although the whole cannot."""
        return False

    def __reduce__(self) -> tuple[type[NotCompiled], tuple[str, str]]:
        return type(self), (self.reason, self.next_step)


class GradientsNeeded(NotCompiled):
    """Grad mode is on, and an input, or a tensor that forward writes to, needs a gradient.

    Call within ``torch.inference_mode()`` or ``torch.no_grad()``.
    """


class TrainingMode(NotCompiled):
    """The module, or one of its submodules, is in training mode; call ``eval()``."""


class Uninitialized(NotCompiled):
    """A parameter of the module gets its shape from the first call, which runs in eager."""


class UnsupportedInput(NotCompiled):
    """Compiled code cannot take an argument: it is complex, sparse, or a tensor subclass.

    The message names it. Convert it before the call.
    """


class UnsupportedTarget(NotCompiled):
    """No code can be generated for the device of the inputs, or they are on several devices."""


class CaptureError(NotCompiled):
    """Neither TorchScript nor ``torch.export`` can turn the module into one graph of operators."""


class DependsOnValues(CaptureError):
    """Control flow, a shape or a number depends on the values of tensors."""

    @property
    def parts_may_compile(self) -> bool:
        """Those between the decisions."""
        return True


class NumberNeeded(CaptureError):
    """Forward needs the values of numbers among its arguments, for more than arithmetic.

    Parameters
    ----------
    places
        Which leaves of the arguments these numbers are; empty if that is not known.
    """

    def __init__(self, places: Collection[int] = ()) -> None:
        self.places = frozenset(places)
        super().__init__(
            "forward needs the value of a number", "Nothing: the value is part of the key."
        )

    def __reduce__(self) -> tuple[type[NumberNeeded], tuple[Collection[int]]]:  # type: ignore[override]
        return type(self), (self.places,)


class BuildError(NotCompiled):
    """TVM, LLVM or the linker failed on a captured program; the message names the stage."""


class CacheMiss(NotCompiled):
    """No cache has the program of a call, and ``on_miss`` forbids compiling it now.

    Compile ahead with ``tvmify warmup``.
    """


class TracedElsewhere(NotCompiled):
    """Another thread is in torch's tracing, which ours would disturb; later calls may compile."""


class UnsupportedOperator(NotCompiled):
    """The program uses operators, or an effect, that the compiler does not know.

    Parameters
    ----------
    operators
        Qualified names, e.g. ``["aten.grid_sampler_2d.default"]``; sorted and without duplicates.
    detail
        More than "unknown", when there is more to say.
    """

    def __init__(self, operators: Sequence[str], detail: str = "") -> None:
        self.operators = tuple(sorted(set(operators)))
        self.detail = detail
        super().__init__(
            f"TVM cannot compile {', '.join(self.operators)}" + (f": {detail}" if detail else ""),
            "To compile the rest, decorate the submodules around the operator instead.",
        )

    @property
    def parts_may_compile(self) -> bool:
        """Those between the changes of the module's attributes, if these stand in the way."""
        return SET_ATTRIBUTE in self.operators

    def __reduce__(self) -> tuple[type[UnsupportedOperator], tuple[Sequence[str], str]]:  # type: ignore[override]
        return type(self), (self.operators, self.detail)


def described(error: BaseException, longest: int = 300) -> str:
    """Return the type and the first line of an error: the text of many says nothing alone."""
    line = (str(error).strip().splitlines() or [""])[0][:longest]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


class TvmifyWarning(UserWarning):
    """A call runs slower than it could: in eager, or without the disk cache.

    With ``strict=True`` a call that would run in eager raises `NotCompiled` instead.
    """


def warn(message: str) -> None:
    """Warn at the line that led here from outside of tvmify and PyTorch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_internal(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    warnings.warn(message, TvmifyWarning, stacklevel=level)


def _is_internal(module: str) -> bool:
    return module.partition(".")[0] in ("tvmify", "torch")
