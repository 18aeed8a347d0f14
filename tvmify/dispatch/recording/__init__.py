"""Records the signatures of calls as JSON lines, which ``tvmify warmup --from`` compiles."""

from __future__ import annotations

import json
import os
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tvmify.dispatch.generality.declared import Declared
from tvmify.dispatch.recording import trees
from tvmify.dispatch.recording.modes import modes_now
from tvmify.dispatch.recording.trees import text_of, tree_of, value_of
from tvmify.dispatch.subject import Name, Subject
from tvmify.errors import WarmUpError, warn_once
from tvmify.signature import Args, Kwargs
from tvmify.system.forks import short_lock
from tvmify.system.regular_files import open_regular
from tvmify.torch_compat.declared_sizes import DeclaredSize
from tvmify.torch_compat.parts import trains

#: Incremented whenever the meaning of a line changes.
VERSION = 1

#: The errors of making arguments; the last one is for tensors on a GPU and a torch without CUDA.
_NOT_MADE = ValueError, KeyError, TypeError, AttributeError, RuntimeError, AssertionError

#: Whether this process records its calls; a process that warms up does not.
is_on = True

_LOCK = short_lock()
_written: set[tuple[Path, str]] = set()
_warned: set[str] = set()


@dataclass(frozen=True)
class Recorded:
    """One signature.

    Attributes
    ----------
    module
        Name of the class, or of the function.
    method
        Name of the method; empty for a function.
    args, kwargs
        The arguments, see `tvmify.dispatch.recording.trees`.
    modes
        Torch's modes, see `tvmify.dispatch.recording.modes`, and whether the module was training.
    sizes
        The declared sizes of tensors, by index of the leaf: for each axis the fields of a
        `DeclaredSize`, or None.
    with_cache
        Whether a cache of transformers, taken apart, is the first of the arguments.
    """

    module: str
    method: str
    args: list[Any]
    kwargs: Kwargs
    modes: dict[str, Any]
    sizes: dict[str, Any] = field(default_factory=dict)
    with_cache: bool = False

    @classmethod
    def of(cls, named: Name, args: Args, kwargs: Kwargs, training: bool) -> Recorded:
        """Describe a call of a subject that is no part.

        Raises
        ------
        WarmUpError
            An argument cannot be written as JSON.
        """
        described = [tree_of(value) for value in args]
        keywords = {name: tree_of(value) for name, value in kwargs.items()}
        modes = modes_now() | {"training": training}
        return cls(
            named.owner, named.method, described, keywords, modes, with_cache=named.with_cache
        )

    def with_sizes(self, declared: Declared) -> Recorded:
        """Return the same signature with declared sizes."""
        sizes = {
            str(leaf): [size and astuple(size) for size in shape]
            for leaf, shape in declared.items()
        }
        return replace(self, sizes=sizes)

    def declared(self) -> Declared:
        """Return the declared sizes."""
        return {
            int(leaf): tuple(size and DeclaredSize(*size) for size in shape)
            for leaf, shape in self.sizes.items()
        }

    def to_json(self) -> str:
        """Return the line."""
        rare = ("sizes", "with_cache")
        fields = {name: value for name, value in vars(self).items() if name not in rare or value}
        return json.dumps({"version": VERSION} | fields)

    @classmethod
    def from_json(cls, line: str | bytes) -> Recorded:
        """Read a line.

        Raises
        ------
        WarmUpError
            It is not a signature, or has another version.
        """
        try:
            entry = json.loads(line)
            version = entry.pop("version")
            recorded = cls(**entry)
            fields = (str, str, list, dict, dict, dict, bool)
            if version != VERSION or any(map(_is_other, vars(recorded).values(), fields)):
                raise ValueError(f"version {version}")
            used = recorded.modes.get("autocast", {}), recorded.modes.get("threads", 1)
            if any(map(_is_other, used, (dict, int))):
                raise ValueError(f"modes {used}")
            str(recorded)
            recorded.declared()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WarmUpError(f"not a signature: {error!r}") from error
        return recorded

    def call(self, on_cpu: bool = False) -> tuple[Args, Kwargs]:
        """Return arguments of such a call, with tensors of zeros.

        Parameters
        ----------
        on_cpu
            Make all tensors on the CPU, because the GPU is in another machine.

        Raises
        ------
        WarmUpError
            A description is not valid, or names a class that is not imported.
        """
        place = trees.on_cpu if on_cpu else lambda tree: tree
        try:
            args = tuple(value_of(place(tree)) for tree in self.args)
            return args, {name: value_of(place(tree)) for name, tree in self.kwargs.items()}
        except _NOT_MADE as error:
            raise WarmUpError(f"the arguments cannot be made: {error}") from error

    def __str__(self) -> str:
        values = [*map(text_of, self.args), *(f"{n}={text_of(t)}" for n, t in self.kwargs.items())]
        name = Name(self.module, self.method, self.with_cache)
        casts = "".join(f" autocast {dtype}" for dtype in self.modes.get("autocast", {}).values())
        return f"{name}({', '.join(values)}){casts}"


def record(subject: Subject, args: Args, kwargs: Kwargs) -> None:
    """Append the signature of a call to the file of the option ``record``, once."""
    path = subject.options.record_file()
    if path is None or not is_on:
        return
    try:
        module = subject.module()
        training = module is not None and trains(module)
        line = Recorded.of(subject.named, args, kwargs, training).to_json()
    except WarmUpError as error:
        warn_once(_warned, f"a call of {subject.name} is not recorded: {error}")
        return
    with _LOCK:
        if (path, line) in _written:
            return
        _written.add((path, line))
    try:
        append(path, line)
    except OSError as error:
        warn_once(_warned, f"signatures are not recorded: {path}: {error.strerror}")


def append(path: Path, line: str) -> None:
    """Append a line by a single write, which is atomic among processes.

    It also begins with a line break, in case a power cut has left half a line.
    """
    # Without O_NONBLOCK, opening a pipe without a reader would block the call.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags, 0o600)
    try:
        os.write(file, f"\n{line}\n".encode())
    finally:
        os.close(file)


class Signatures(NamedTuple):
    """The distinct signatures of a file, and how many of its lines are not signatures."""

    found: list[Recorded]
    unreadable: int


def read(path: Path) -> Signatures:
    """Return the signatures of a file.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    found: dict[str, Recorded] = {}
    unreadable = 0
    with open_regular(path) as file:
        lines = file.read().splitlines()
    for line in filter(None, lines):
        try:
            recorded = Recorded.from_json(line)
        except WarmUpError:
            unreadable += 1
        else:
            found[recorded.to_json()] = recorded
    return Signatures(list(found.values()), unreadable)


def _is_other(value: object, kind: type) -> bool:
    return type(value) is not kind
