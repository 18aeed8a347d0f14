"""The option of `tvmify.compile`: its keys, and the values that they take."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tvmify import target as targets
from tvmify.errors import OptionError
from tvmify.options import check_names

_DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
#: What ``input_infos`` takes, for messages.
INPUT_INFOS = (
    "a list with a name and a shape for each input, such as [('x', (1, 3, 224, 224))], and a dtype "
    "where it is not the default, as in ('ids', (1, 128), 'int64'); or a list of such lists, one "
    "for each kind of call"
)


class InputInfo(NamedTuple):
    """One item of ``input_infos``; the dtype is None for the default."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class CompileOption:
    """The checked option of `tvmify.compile`, where the fields are described."""

    input_infos: Sequence[Sequence[InputInfo]] = ()
    default_dtype: torch.dtype | None = None
    num_outputs: int | None = None
    tuning_n_trials: int = 0
    tuning_log_file: Path | None = None
    export_dir: Path | None = None
    target: str | Mapping[str, Any] | None = None
    device: torch.device | None = None

    @classmethod
    def of(cls, option: Mapping[str, Any] | None) -> CompileOption:
        """Check the option that a caller gave.

        Raises
        ------
        OptionError
            A key or its value is wrong; the message lists the valid ones.
        """
        if option is None:
            return cls()
        if not isinstance(option, Mapping):
            raise OptionError(f"option is {option!r}: expected a dict with {', '.join(_READERS)}")
        check_names(option, list(_READERS))
        return cls(**{name: _READERS[name](value) for name, value in option.items()})


def wrong_value(name: str, value: object, expected: str) -> OptionError:
    """Return the error for a value of a key."""
    return OptionError(f"option {name!r} is {value!r}: expected {expected}")


def _input_infos(value: Any) -> list[list[InputInfo]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise wrong_value("input_infos", value, INPUT_INFOS)
    first = value[0]
    is_one = isinstance(first, Sequence) and len(first) > 0 and isinstance(first[0], str)
    signatures = [value] if is_one else value
    if not all(isinstance(infos, Sequence) and infos for infos in signatures):
        raise wrong_value("input_infos", value, INPUT_INFOS)
    read = [[_input_info(info) for info in infos] for infos in signatures]
    for infos in read:
        names = [info.name for info in infos]
        if len(set(names)) < len(names):
            raise wrong_value("input_infos", value, "a different name for each input")
    return read


def _input_info(info: Any) -> InputInfo:
    match info:
        case [str(name), [[*shape], dtype]] | [str(name), [*shape], dtype]:
            pass
        case [str(name), [*shape]]:
            dtype = None
        case _:
            raise wrong_value("input_infos", info, INPUT_INFOS)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise wrong_value("input_infos", info, "a shape of ints from 0 on")
    named: Any = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not isinstance(named, torch.dtype):
        raise wrong_value("input_infos", info, "a dtype of PyTorch, such as 'float32' or 'int64'")
    return InputInfo(name, tuple(shape), named)


def _default_dtype(value: Any) -> torch.dtype:
    dtype: Any = _DTYPES.get(value) if isinstance(value, str) else value
    if dtype not in _DTYPES.values():
        raise wrong_value("default_dtype", value, f"one of {', '.join(map(repr, _DTYPES))}")
    return dtype


def _num_outputs(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise wrong_value("num_outputs", value, "an int above 0")
    return value


def _tuning_n_trials(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise wrong_value("tuning_n_trials", value, "0 for no tuning, or an int above 0")
    return value


def _tuning_log_file(value: Any) -> Path:
    path = _path("tuning_log_file", value)
    if path.is_dir() or not path.parent.is_dir():
        raise wrong_value("tuning_log_file", value, "the path of a file in a folder that exists")
    return path


def _export_dir(value: Any) -> Path:
    path = _path("export_dir", value)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise wrong_value("export_dir", value, f"a folder to write to ({error})") from error
    return path


def _path(name: str, value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise wrong_value(name, value, "a path")
    return Path(value)


def _device(value: Any) -> torch.device:
    expected = "'cpu'" + (
        ", 'cuda' or 'cuda:N'" if torch.cuda.is_available() else " on this machine"
    )
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise wrong_value("device", value, expected) from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and "cuda" not in expected):
        raise wrong_value("device", value, expected)
    return device


_READERS: dict[str, Callable[[Any], Any]] = {
    "input_infos": _input_infos,
    "default_dtype": _default_dtype,
    "num_outputs": _num_outputs,
    "tuning_n_trials": _tuning_n_trials,
    "tuning_log_file": _tuning_log_file,
    "export_dir": _export_dir,
    "target": targets.check,
    "device": _device,
}
