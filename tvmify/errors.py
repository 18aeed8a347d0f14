"""All exceptions and warnings of tvmify; each says what happened and what to do next."""

from __future__ import annotations

import enum
import sys
import warnings
from collections.abc import Collection, Sequence

#: TorchScript's operators that set an attribute of a module, and print.
SET_ATTRIBUTE = "prim::SetAttr"
PRINT = "prim::Print"


class TvmifyError(Exception):
    """Base class of all exceptions that tvmify itself raises."""


class OptionError(TvmifyError, ValueError):
    """An option or its value is not valid; the message lists the valid ones."""


class CacheError(TvmifyError):
    """A cache directory, archive or entry cannot be used; the message names it.

    Calls never raise it: if the cache fails, they warn and keep programs in memory. Only commands
    and functions that manage a cache raise it. ``tvmify doctor`` says how to repair one.
    """


class NativeLibraryError(TvmifyError, ImportError):
    """The native library is missing, or was built for another torch or TVM: reinstall tvmify."""


class SaveError(TvmifyError, ValueError):
    """A module cannot be saved or exported; the message says why and what to change."""


class ArchiveError(TvmifyError):
    """A file is not a saved module, is damaged, or was not signed with the given key.

    Save it again, or copy it again from an intact original.
    """


class WarmUpError(TvmifyError, ValueError):
    """A signature given to `warmup` cannot be turned into tensors, or its method is ambiguous."""


class Divisible(enum.Enum):
    """Which parts of a program that cannot be compiled whole may be compiled.

    Attributes
    ----------
    NOT
        None.
    BY_REGIONS
        The regions between decisions and effects, or else the submodules.
    BY_SUBMODULES
        The submodules, which forward calls in Python, in every call of the module.
    THIS_CALL_BY_SUBMODULES
        The same in this call; other calls of the module may be one program.
    """

    NOT = enum.auto()
    BY_REGIONS = enum.auto()
    BY_SUBMODULES = enum.auto()
    THIS_CALL_BY_SUBMODULES = enum.auto()


class NotCompiled(TvmifyError):
    """The reason why a call runs in eager PyTorch instead of compiled code.

    With ``strict=False`` the call runs in eager and warns once, and ``explain()`` says the
    reason. With ``strict=True`` it is raised.

    Parameters
    ----------
    reason
        What cannot be compiled, naming the operator, mode, tensor or device.
    next_step
        A sentence that says what the user can do about it.

    Attributes
    ----------
    reason, next_step
        As given.
    divisible
        Which parts of the program may be compiled although the whole cannot.
    read
        Names of the module's buffers whose values led here; with others, it may be compiled.

    Examples
    --------
    >>> try:
    ...     tvmify(model, strict=True)(x)
    ... except tvmify.NotCompiled as error:
    ...     print(error.reason, error.next_step)
    """

    divisible: Divisible = Divisible.NOT
    read: tuple[str, ...] = ()

    def __init__(self, reason: str, next_step: str) -> None:
        super().__init__(f"{reason}. {next_step}")
        self.reason = reason
        self.next_step = next_step

    def __reduce__(self) -> tuple[type[NotCompiled], tuple[str, str]]:
        return type(self), (self.reason, self.next_step)


class GradientsNeeded(NotCompiled):
    """Grad mode is on, and an input, or a tensor that forward writes to, needs a gradient.

    Call within ``torch.inference_mode()`` or ``torch.no_grad()``.
    """


class TrainingMode(NotCompiled):
    """The module, or one of its submodules, is in training mode; call ``eval()``."""


class Uninitialized(NotCompiled):
    """A lazy parameter gets its shape from the first call, which therefore runs in eager."""


class UnsupportedInput(NotCompiled):
    """Compiled code cannot take an argument, such as a sparse or quantized tensor, or a subclass.

    The message names it; convert it before the call.

    Parameters
    ----------
    argument, kind
        Which argument it is, and what stands in the way, if that is one of the arguments.
    """

    def __init__(self, reason: str, next_step: str, *, argument: str = "", kind: str = "") -> None:
        super().__init__(reason, next_step)
        self.argument = argument
        self.kind = kind


class UnsupportedObject(UnsupportedInput):
    """An argument is an object of a class that only forward knows, such as a dataclass."""

    # forward calls the submodules with the contents of the object
    divisible = Divisible.THIS_CALL_BY_SUBMODULES


class UnsupportedTarget(NotCompiled):
    """There is no code generator for the inputs' device, or they are on several devices."""


class CaptureError(NotCompiled):
    """Neither TorchScript nor ``torch.export`` can capture the module as one graph."""


class DependsOnValues(CaptureError):
    """Control flow, a shape or a number depends on the values of tensors."""

    divisible = Divisible.BY_REGIONS


class HasEffects(CaptureError):
    """Forward prints or logs, or changes what outlives the call: a list, a counter, an object.

    Compiled code only computes. So that side effects happen once a call, forward runs in Python,
    and the submodules that it calls are compiled.

    Parameters
    ----------
    may_cease
        Whether a later call may be without: the first one fills caches.
    """

    divisible = Divisible.BY_REGIONS

    def __init__(
        self,
        reason: str,
        next_step: str = "Move this out of forward to compile all of forward, or decorate the "
        "submodules around it.",
        *,
        may_cease: bool = False,
    ) -> None:
        super().__init__(reason, next_step)
        self.may_cease = may_cease


class ChangesItself(HasEffects):
    """The module sets attributes in every call, not only in its first ones."""

    divisible = Divisible.BY_SUBMODULES


class NeedsPython(CaptureError):
    """Forward asks what only eager PyTorch can answer, returns objects of an unknown class, or
    passes functions to operators.
    """

    divisible = Divisible.BY_SUBMODULES


class NotRecorded(CaptureError):
    """``torch.export`` failed at a call, for a reason that is not known."""

    divisible = Divisible.THIS_CALL_BY_SUBMODULES


class NumberNeeded(CaptureError):
    """Forward uses the values of numbers in its arguments for more than arithmetic.

    Parameters
    ----------
    places
        Indices of these numbers among the leaves of the arguments; empty if not known.
    """

    def __init__(self, places: Collection[int] = ()) -> None:
        self.places = frozenset(places)
        super().__init__(
            "forward needs the value of a number",
            "Nothing to do: each value gets its own program.",
        )

    def __reduce__(self) -> tuple[type[NumberNeeded], tuple[Collection[int]]]:  # type: ignore[override]
        return type(self), (self.places,)


class BuildError(NotCompiled):
    """TVM, LLVM or the linker failed on a captured program; the message names the stage."""


class NothingToCompute(BuildError):
    """A program only returns arguments, or views of them, and constants."""


class EagerRaises(NotCompiled):
    """Eager PyTorch raises an error for a call that compiled code computes.

    An example is a standard deviation of integers: torch.export records operators that compute one.

    Parameters
    ----------
    error
        What eager PyTorch raises.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"eager PyTorch raises {type(error).__name__} for this call: {headline(error)}",
            "Change the call or the module so that it runs in eager PyTorch.",
        )


class CacheMiss(NotCompiled):
    """No cache has the program of a call, and ``on_miss`` does not allow compiling it now.

    Compile it ahead of time with ``tvmify warmup``.
    """


class TracedElsewhere(NotCompiled):
    """Another thread is tracing with torch, and a capture would disturb it; a later call may
    compile. The reason is temporary, and so are those of subclasses.
    """


class SmallStack(TracedElsewhere):
    """The thread has too small a stack for a compiler; another one may compile."""


_SETS_ATTRIBUTES = (
    "Calls that change nothing run compiled. If every call changes something, the modules that "
    "forward calls are compiled instead."
)


class UnsupportedOperator(NotCompiled):
    """The program uses operators, or an effect, that the compiler does not support.

    For operators, forward runs in Python, and the submodules that it calls are compiled.

    Parameters
    ----------
    operators
        Qualified names, e.g. ``["aten.grid_sampler_2d.default"]``, sorted and without duplicates.
    detail
        Why, if there is more to say than that they are unknown.
    next_step
        As for `NotCompiled`.
    """

    def __init__(
        self,
        operators: Sequence[str],
        detail: str = "",
        next_step: str = "To compile the rest, move the code around the operator into submodules; "
        "with strict=True, decorate them.",
    ) -> None:
        self.operators = tuple(sorted(set(operators)))
        self.detail = detail
        reason = f"TVM cannot compile {', '.join(self.operators)}" + (
            f": {detail}" if detail else ""
        )
        if detail and self.operators == (SET_ATTRIBUTE,):
            reason, next_step = detail, _SETS_ATTRIBUTES
        super().__init__(reason, next_step)
        is_effect = self.sets_attributes or PRINT in self.operators
        self.divisible = Divisible.BY_REGIONS if is_effect else Divisible.THIS_CALL_BY_SUBMODULES

    @property
    def sets_attributes(self) -> bool:
        """Whether the program changes attributes of the module."""
        return SET_ATTRIBUTE in self.operators

    def __reduce__(self) -> tuple[type[UnsupportedOperator], tuple[Sequence[str], str, str]]:  # type: ignore[override]
        return type(self), (self.operators, self.detail, self.next_step)


def headline(message: object, longest: int = 300) -> str:
    """Return the first line of a message as part of a sentence, so without a full stop.

    Long ones are cut, since TVM prints whole programs.
    """
    lines = str(message).strip().splitlines()
    return lines[0].rstrip()[:longest].removesuffix(".") if lines else ""


def described(error: BaseException, longest: int = 300) -> str:
    """Return the type and the first line of an error, since many texts mean little on their own."""
    line = headline(error, longest)
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


class TvmifyWarning(UserWarning):
    """A call is slower than it could be: it runs in eager, or without the disk cache.

    With ``strict=True``, a call that would run in eager raises `NotCompiled` instead.
    """


def warn(message: str) -> None:
    """Issue a warning that points at the caller's line outside tvmify and PyTorch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_internal(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    warnings.warn(message, TvmifyWarning, stacklevel=level)


def warn_once(shown: set[str], message: str) -> None:
    """Issue a warning, unless ``shown`` already has it."""
    if message not in shown:
        shown.add(message)
        warn(message)


def _is_internal(module: str) -> bool:
    return module.partition(".")[0] in ("tvmify", "torch")
