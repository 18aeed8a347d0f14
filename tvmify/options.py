"""The options of ``@tvmify``."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from tvmify import target as targets
from tvmify.errors import OptionError
from tvmify.system import variables
from tvmify.target import TargetOption
from tvmify.torch_compat.declared_sizes import declared_size

# Marks a field that cannot change the compiled code, so it is not part of the disk key.
_NOT_KEYED = {"keyed": False}
# A URL after Path has collapsed its slashes: it would name a folder in the current directory.
_HALF_A_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")

#: Values of ``on_miss``.
ON_MISS = ("build", "background", "eager", "error")


#: What the modes of ``torch.compile`` mean.
_MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cuda_graph": True},
    "max-autotune": {"tune": "quick", "cuda_graph": True},
    "max-autotune-no-cudagraphs": {"tune": "quick"},
}
#: What to write instead of the other arguments of ``torch.compile``.
_OF_TORCH_COMPILE = {
    "backend": 'leave it out, or write torch.compile(model, backend="tvmify")',
    "disable": "set TVMIFY_DISABLE=1",
    "fullgraph": "write strict=True, with which a call never runs in eager PyTorch",
    "options": "write them as keywords",
}
#: What others call an option.
_OTHER_NAMES = {"device": "target", "precision": "accuracy"}


class Options(TypedDict, total=False):
    """The keyword arguments of `tvmify`, for type checkers.

    They are the fields of `CompileOptions`, and ``mode``, which sets some of them.
    """

    target: TargetOption
    accuracy: Literal["default", "strict"]
    dynamic: bool | None
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None
    tune: Literal["quick"] | bool | None
    compare: bool
    cuda_graph: bool
    strict: bool
    cache: bool | str | os.PathLike[str]
    cache_size: int
    progress: bool | None
    on_miss: Literal["build", "background", "eager", "error"]
    record: str | os.PathLike[str] | None
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """How a decorated module is compiled and cached, and what happens if it cannot be compiled.

    The constructor checks the values; a wrong one raises `OptionError`.

    Attributes
    ----------
    target
        What TVM builds for: ``"llvm"`` (or ``"cpu"``), ``"cuda"``, a ``torch.device``, a dict of
        TVM's target attributes with a ``"kind"``, or None to follow the device of the inputs.
    accuracy
        ``"default"``: the largest error of a layer, against float64, is at most 5 times that of
        eager PyTorch, or 1.5e-6 of the largest output. ``"strict"``: at most twice eager's; this
        rules out Winograd convolutions and compact (24-bit) weights, and is somewhat slower.
    dynamic
        False: each shape gets its own program. None: the first shape does; when a second differs
        only in sizes, those that differ become symbols, and one program (or a few, by size) serves
        all such calls. True: all sizes of 2 and more are symbols from the first call on. CPU only.
    dynamic_shapes
        Which sizes are symbols from the first call on, and their limits, in the form that
        ``torch.export.export`` takes: a dict by argument name, or a tuple in the order of the
        arguments. For each tensor it has a dict by axis, or a size for each axis. A symbol is a
        ``Dim``, ``Dim.AUTO`` or ``Dim.DYNAMIC``; a static size is ``Dim.STATIC``, an int or None.
        All other sizes follow ``dynamic``. A call outside the limits gets a program for its own
        shape.
    tune
        None: a cost model chooses the kernels. ``"quick"``: candidates for each matrix product,
        convolution, attention, recurrent layer, pool, reduction and element-wise kernel are timed
        for a few milliseconds, once per workload, processor and number of threads; about 20 seconds
        in total at most. True means ``"quick"``, False means None.
    compare
        After a build, time compiled code against eager PyTorch on the inputs of the call, for
        about 0.1 s, or up to 2 s while eager is ahead, and use the faster one. With False, or with
        ``strict``, compiled code is always used.
    cuda_graph
        On a GPU, capture each signature as a CUDA graph at its second call and replay it from then
        on. A module keeps at most 16 graphs and evicts the least recently used. Programs that write
        to tensors or draw random numbers are not captured.
    strict
        Raise the `NotCompiled` error instead of running in eager PyTorch.
    cache
        Where compiled programs are stored. True: the user's cache directory (``TVMIFY_CACHE_DIR``
        if set). A path: that directory. False: memory only. A URL that fsspec supports
        (``"s3://bucket/prefix"``, ``"file:///shared/folder"``): the user's directory, and behind
        it a shared cache, for several machines; ``TVMIFY_CACHE_URL`` sets one for all modules.
    cache_size
        How many signatures one module keeps in memory. More evict the least recently used, with a
        warning. After as many evictions, further signatures run in eager until `refresh`, except
        with ``strict`` and in `warmup`.
    progress
        Show the stages of a compilation. None shows them when standard error is a terminal.
    on_miss
        What a call does if no cache has its program. ``"build"``: wait for the compiler.
        ``"background"``: run in eager PyTorch while a low-priority process compiles; a later call
        runs the result. ``"eager"``: run in eager PyTorch. ``"error"``: raise `CacheMiss`.
    record
        File to which every called signature is appended, for ``tvmify warmup --from``. None: the
        file named by ``TVMIFY_RECORD``, if any.

    Raises
    ------
    OptionError
        A value is wrong; the message lists the expected ones.

    Examples
    --------
    >>> @tvmify(strict=True, cache="/var/cache/tvmify", on_miss="error")
    ... class Net(nn.Module): ...
    """

    # The key has a separate entry for the target, resolved for the device of the call.
    target: TargetOption = field(default=None, metadata=_NOT_KEYED)
    accuracy: str = "default"
    dynamic: bool | None = field(default=None, metadata=_NOT_KEYED)
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = field(
        default=None, metadata=_NOT_KEYED
    )
    tune: str | bool | None = None
    compare: bool = field(default=True, metadata=_NOT_KEYED)
    cuda_graph: bool = field(default=False, metadata=_NOT_KEYED)
    strict: bool = field(default=False, metadata=_NOT_KEYED)
    cache: bool | str | os.PathLike[str] = field(default=True, metadata=_NOT_KEYED)
    cache_size: int = field(default=64, metadata=_NOT_KEYED)
    progress: bool | None = field(default=None, metadata=_NOT_KEYED)
    on_miss: str = field(default="build", metadata=_NOT_KEYED)
    record: str | os.PathLike[str] | None = field(default=None, metadata=_NOT_KEYED)

    def __deepcopy__(self, memo: object) -> CompileOptions:
        return self  # it cannot change

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", targets.check(self.target))
        if isinstance(self.tune, bool):
            object.__setattr__(self, "tune", "quick" if self.tune else None)
        path = os.fspath(self.cache) if isinstance(self.cache, (str, os.PathLike)) else ""
        checks = (
            ("accuracy", self.accuracy in ("default", "strict"), "'default' or 'strict'"),
            ("dynamic", isinstance(self.dynamic, bool | None), "True, False or None"),
            (
                "dynamic_shapes",
                isinstance(self.dynamic_shapes, Mapping | list | tuple | None),
                "a dict by argument name, or a tuple with an item for each argument",
            ),
            ("tune", self.tune in (None, "quick"), "None or 'quick'"),
            ("compare", isinstance(self.compare, bool), "True or False"),
            ("cuda_graph", isinstance(self.cuda_graph, bool), "True or False"),
            ("strict", isinstance(self.strict, bool), "True or False"),
            ("cache", isinstance(self.cache, (bool, str, os.PathLike)), "a bool, a path or a URL"),
            ("cache", self.cache != "", "the path of a directory"),
            ("cache", not _HALF_A_URL.match(path), "a path, or a URL as a string with '://'"),
            ("cache_size", type(self.cache_size) is int and self.cache_size > 0, "an int above 0"),
            ("progress", self.progress in (None, True, False), "a bool or None"),
            ("on_miss", self.on_miss in ON_MISS, f"one of {', '.join(map(repr, ON_MISS))}"),
            ("record", isinstance(self.record, str | os.PathLike | None), "a path or None"),
        )
        for name, holds, expected in checks:
            if not holds:
                value = getattr(self, name)
                raise OptionError(f"option {name!r} is {value!r}: expected {expected}")
        _check_sizes(self.dynamic_shapes)

    @classmethod
    def of(cls, given: Mapping[str, Any], without: Collection[str] = ()) -> CompileOptions:
        """Create options from keyword arguments.

        Parameters
        ----------
        given
            The arguments: fields, and ``mode``; see `options_of_mode`.
        without
            Names of options that may not be among them.

        Raises
        ------
        OptionError
            A name or value is not valid; the message lists the valid ones.
        """
        names = [f.name for f in dataclasses.fields(cls) if f.name not in without]
        given = {**options_of_mode(given.get("mode")), **given}
        given.pop("mode", None)
        for name in given:
            if advice := _OF_TORCH_COMPILE.get(name):
                raise OptionError(f"option {name!r} belongs to torch.compile: {advice}")
        check_names(given, names)
        return cls(**given)

    def key_text(self) -> str:
        """Return the options that can change the compiled code, one ``name=value`` per line."""
        keyed = (f.name for f in dataclasses.fields(self) if f.metadata.get("keyed", True))
        return "\n".join(f"{name}={getattr(self, name)!r}" for name in keyed)

    def compares(self) -> bool:
        """Whether compiled code is timed against eager PyTorch, to use the faster one.

        ``TVMIFY_COMPARE=0`` turns this off, for when results must not depend on timing.
        """
        return self.compare and not self.strict and variables.may_compare()

    def cache_directory(self) -> Path | None:
        """Return the directory of the disk cache, or None if there is none."""
        if self.cache is False:
            return None
        if self.cache is not True and not _is_url(self.cache):
            return variables.expanded(self.cache)
        return variables.cache_directory()

    def cache_url(self) -> str | None:
        """Return the URL of the level behind `cache_directory`, or None if there is none."""
        if self.cache is False:
            return None
        if _is_url(self.cache):
            return str(self.cache)
        return variables.cache_url()

    def record_file(self) -> Path | None:
        """Return the file to which signatures are appended, or None."""
        chosen = self.record or variables.record_file()
        # Path.expanduser would raise an error for a user who has no home directory.
        return variables.fixed(os.path.expanduser(chosen)) if chosen else None  # noqa: PTH111

    def shows_progress(self) -> bool:
        """Whether to draw the stages of a compilation on standard error."""
        if self.progress is not None:
            return self.progress
        return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


def options_of_mode(mode: str | None) -> Mapping[str, Any]:
    """Return the options that a mode of ``torch.compile`` means.

    Raises
    ------
    OptionError
        It does not exist.
    """
    if mode is not None and (not isinstance(mode, str) or mode not in _MODES):
        raise OptionError(f"mode is {mode!r}: expected one of {', '.join(_MODES)}")
    return _MODES[mode or "default"]


def check_path(path: object, call: str) -> None:
    """Refuse what is not a path, such as a module.

    Parameters
    ----------
    call
        How the function is called right.

    Raises
    ------
    OptionError
        It is not a path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"path is a {type(path).__qualname__}: write {call}")


def check_names(given: Iterable[str], names: Sequence[str]) -> None:
    """Compare the names of options with those that exist.

    Raises
    ------
    OptionError
        One does not exist; the message lists them, and says which is nearest.
    """
    for name in given:
        if name not in names:
            meant = _OTHER_NAMES.get(str(name), str(name))
            near = difflib.get_close_matches(meant, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"unknown option {name!r}: choose from {', '.join(names)}{hint}")


def _check_sizes(given: Any) -> None:
    """Refuse what ``dynamic_shapes`` cannot hold, as far as is known without a call."""
    if isinstance(given, (Mapping, list, tuple)):
        for part in given.values() if isinstance(given, Mapping) else given:
            _check_sizes(part)
        return
    try:
        declared_size(given)
    except OptionError as error:
        raise OptionError(f"option 'dynamic_shapes': {error}") from None


def _is_url(cache: bool | str | os.PathLike[str]) -> bool:
    return isinstance(cache, str) and "://" in cache
