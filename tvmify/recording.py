"""The signatures that a program calls, as JSON lines: what ``tvmify warmup --from`` compiles.

A file holds texts, numbers and names of dtypes. Nothing of it is evaluated or unpickled, and no
module is imported for it: a class that it names has to be imported already.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmify.errors import NotCompiled, WarmUpError
from tvmify.explanation import warn_once
from tvmify.options import CompileOptions
from tvmify.runtime import casting, casts_now
from tvmify.signature import check_tensor
from tvmify.structure import structure_of, structure_text

#: Raised whenever a line means something else than before.
VERSION = 1

#: Whether this process writes what its calls look like: one that warms up does not.
is_on = True

_LOCK = threading.Lock()
_written: set[tuple[Path, str]] = set()
_said: set[str] = set()


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
        The arguments as values that JSON can hold, see `tree_of`.
    modes
        Of torch, and whether the module was in training mode, see `modes_now`.
    """

    module: str
    method: str
    args: list[Any]
    kwargs: dict[str, Any]
    modes: dict[str, Any]

    @classmethod
    def of(
        cls, module: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> Recorded:
        """Describe a call.

        Raises
        ------
        WarmUpError
            An argument is of a kind that no line holds.
        """
        trees = [tree_of(value) for value in args]
        named = {name: tree_of(value) for name, value in kwargs.items()}
        return cls(module, method, trees, named, modes_now() | {"training": training})

    def to_json(self) -> str:
        """Return the line."""
        return json.dumps({"version": VERSION} | vars(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> Recorded:
        """Read a line.

        Raises
        ------
        WarmUpError
            It is no signature, or one of another version.
        """
        try:
            entry = json.loads(line)
            version = entry.pop("version")
            recorded = cls(**entry)
            fields = (str, str, list, dict, dict)
            if version != VERSION or any(map(_is_other, vars(recorded).values(), fields)):
                raise ValueError(f"version {version}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WarmUpError(f"no signature: {error!r}") from error
        return recorded

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of such a call, with tensors of zeros.

        Raises
        ------
        WarmUpError
            They are described in a form that does not exist, or name a class that is not imported.
        """
        try:
            args = tuple(map(value_of, self.args))
            return args, {name: value_of(tree) for name, tree in self.kwargs.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise WarmUpError(f"the arguments cannot be made: {error}") from error

    def __str__(self) -> str:
        values = [*map(_text, self.args), *(f"{n}={_text(t)}" for n, t in self.kwargs.items())]
        name = f"{self.module}.{self.method}" if self.method not in ("", "forward") else self.module
        casts = "".join(f" autocast {dtype}" for dtype in self.modes.get("autocast", {}).values())
        return f"{name}({', '.join(values)}){casts}"


def names_of(name: str, module: object) -> tuple[str, str]:
    """Return module and method, as lines name them, of what a dispatcher calls its name."""
    if module is None:
        return name, ""
    cls, _, method = name.partition(".")
    return cls, method or "forward"


def record(
    options: CompileOptions,
    name: str,
    module: torch.nn.Module | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Append the signature of a call to the file that the options name, unless it was before.

    Parameters
    ----------
    name, module
        Of the dispatcher.
    """
    path = options.record_file()
    if path is None or not is_on:
        return
    try:
        training = module is not None and module.training
        line = Recorded.of(*names_of(name, module), args, kwargs, training).to_json()
    except WarmUpError as error:
        warn_once(_said, f"a call of {name} is not recorded: {error}")
        return
    with _LOCK:
        if (path, line) in _written:
            return
        _written.add((path, line))
    try:
        append(path, line)
    except OSError as error:
        warn_once(_said, f"signatures are not recorded: {path}: {error.strerror}")


def append(path: Path, line: str) -> None:
    """Append a line by one write, which POSIX keeps whole among several processes.

    It begins with a line break too: half a line that a power cut left spoils no other.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, f"\n{line}\n".encode())
    finally:
        os.close(file)


def read(path: Path) -> tuple[list[Recorded], int]:
    """Return the different signatures of a file, and how many lines are none.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    found: dict[str, Recorded] = {}
    unreadable = 0
    for line in filter(None, path.read_bytes().splitlines()):
        try:
            recorded = Recorded.from_json(line)
        except WarmUpError:
            unreadable += 1
        else:
            found[recorded.to_json()] = recorded
    return list(found.values()), unreadable


# -------------------------------------------------------------------------------------- arguments


def tree_of(value: Any) -> Any:
    """Return an argument as values that JSON can hold.

    ``None``, bools, ints, strings and lists are as they are; of anything else it is an object whose
    first key says what: ``tensor`` (its shape), ``float``, ``dtype``, ``device``, ``tuple``,
    ``dict`` (pairs), ``structure`` (of another container that pytree knows).

    Raises
    ------
    WarmUpError
        It is of another kind.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:  # JSON has neither NaN nor infinities
        return {"float": repr(value)}
    if isinstance(value, torch.Tensor):
        return _tensor_tree(value)
    if kind in (torch.dtype, torch.device):
        return {kind.__name__: str(value).removeprefix("torch.")}
    if kind is list:
        return [tree_of(item) for item in value]
    if kind is tuple:
        return {"tuple": [tree_of(item) for item in value]}
    if kind is dict:
        return {"dict": [[tree_of(name), tree_of(item)] for name, item in value.items()]}
    leaves, structure = pytree.tree_flatten(value)
    if structure.is_leaf():
        raise WarmUpError(f"a {kind.__module__}.{kind.__qualname__} cannot be written as JSON")
    try:
        text = structure_text(structure)
    except NotCompiled as error:
        raise WarmUpError(str(error)) from error
    return {"structure": text, "leaves": [tree_of(leaf) for leaf in leaves]}


def _tensor_tree(tensor: torch.Tensor) -> dict[str, Any]:
    try:
        check_tensor("a tensor", tensor)
    except NotCompiled as error:
        raise WarmUpError(error.reason) from error
    tree: dict[str, Any] = {
        "tensor": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
    }
    if not tensor.is_contiguous():
        tree["strides"] = list(tensor.stride())
    if tensor.requires_grad and torch.is_grad_enabled():
        tree["requires_grad"] = True
    return tree


def value_of(tree: Any) -> Any:
    """Return what `tree_of` described; the elements of tensors are zero.

    Raises
    ------
    ValueError, KeyError, TypeError, AttributeError, RuntimeError, NotCompiled
        It did not describe this.
    """
    if isinstance(tree, list):
        return [value_of(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return _tensor(tree)
    if "float" in tree:
        return float(tree["float"])
    if "dtype" in tree:
        return dtype_of(tree["dtype"])
    if "device" in tree:
        return torch.device(tree["device"])
    if "tuple" in tree:
        return tuple(value_of(item) for item in tree["tuple"])
    if "dict" in tree:
        return {value_of(name): value_of(item) for name, item in tree["dict"]}
    leaves = [value_of(leaf) for leaf in tree["leaves"]]
    return pytree.tree_unflatten(leaves, structure_of(tree["structure"]))


def _tensor(tree: Mapping[str, Any]) -> torch.Tensor:
    dtype, device = dtype_of(tree["dtype"]), torch.device(tree["device"])
    shape, strides = tree["tensor"], tree.get("strides")
    if strides is None:
        tensor = torch.zeros(shape, dtype=dtype, device=device)
    else:
        last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        elements = 0 if 0 in shape else last + 1
        tensor = torch.zeros(elements, dtype=dtype, device=device).as_strided(shape, strides)
    return tensor.requires_grad_(bool(tree.get("requires_grad", False)))


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name, with or without ``torch.``.

    Raises
    ------
    ValueError
        There is none of that name.
    """
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype


def _text(tree: Any) -> str:
    if isinstance(tree, list):
        return f"[{', '.join(map(_text, tree))}]"
    if not isinstance(tree, dict):
        return repr(tree)
    if "tensor" in tree:
        return f"{tree.get('dtype')}{tree['tensor']}"
    if "tuple" in tree:
        return f"({', '.join(map(_text, tree['tuple']))})"
    if "dict" in tree:
        return f"{{{', '.join(f'{_text(name)}: {_text(item)}' for name, item in tree['dict'])}}}"
    if "leaves" in tree:
        return f"<{', '.join(map(_text, tree['leaves']))}>"
    return str(next(iter(tree.values()), tree))


def _is_other(value: object, kind: type) -> bool:
    return type(value) is not kind


# ------------------------------------------------------------------------------------------ modes


def modes_now() -> dict[str, Any]:
    """Return the modes of torch that lead to another program, or to none."""
    grad = "inference" if torch.is_inference_mode_enabled() else "no_grad"
    return {
        "grad": "grad" if torch.is_grad_enabled() else grad,
        "autocast": {
            device: str(dtype).removeprefix("torch.") for device, dtype in casts_now().items()
        },
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "default_device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


@contextlib.contextmanager
def entered(modes: Mapping[str, Any]) -> Iterator[None]:
    """Put torch into modes that `modes_now` described; those that are missing stay as they are."""
    before = modes_now()
    with contextlib.ExitStack() as stack:
        stack.callback(_set_global_modes, before)
        _set_global_modes(before | dict(modes))
        grad = modes.get("grad", before["grad"])
        stack.enter_context(torch.inference_mode(grad == "inference"))
        stack.enter_context(torch.set_grad_enabled(grad == "grad"))
        casts = modes.get("autocast", before["autocast"]).items()
        stack.enter_context(casting({device: dtype_of(name) for device, name in casts}))
        if (default := modes.get("default_device", "cpu")) != before["default_device"]:
            stack.enter_context(torch.device(default))
        yield


def _set_global_modes(modes: Mapping[str, Any]) -> None:
    torch.set_default_dtype(dtype_of(modes["default_dtype"]))
    torch.use_deterministic_algorithms(bool(modes["deterministic"]))
    torch.set_float32_matmul_precision(modes["matmul_precision"])
    torch.set_num_threads(int(modes["threads"]))
