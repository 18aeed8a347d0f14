"""Saved files: TorchScript archives that ``torch.jit.load`` reads as they are."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.jit import _recursive

from tvmify.errors import ArchiveError, SaveError
from tvmify.runtime.manifest import check, seal

# Importing it registers the classes that archives hold, too.
from tvmify.runtime.native import with_method_renamed
from tvmify.system.regular_files import NotRegular, open_regular
from tvmify.system.zip_records import AmbiguousArchive

#: The method that a saved module keeps the forward in which it came with.
ORIGINAL = "_tvmify_eager"


def write(
    module: torch.jit.ScriptModule, path: Path, description: Mapping[str, Any], key: Any = None
) -> None:
    """Write a module and its manifest; the file appears whole or not at all.

    Parameters
    ----------
    module
        What ``torch.jit.load`` is to return.
    path
        Of the file; one that exists is replaced.
    description
        What the manifest says besides format and digests; values that JSON can hold.
    key
        Signs the manifest, see `tvmify.save`.
    """
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with temporary.open("x+b") as file:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that TorchScript is deprecated
                torch.jit.save(module, file)
            seal(file, description, key)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except AmbiguousArchive as error:
        raise SaveError(f"PyTorch could not read every record of {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], *, key: Any = None, strict: bool | None = None) -> Any:
    """Load a file that `tvmify.save` wrote, after checking every byte of it.

    ``torch.jit.load`` reads the same file, with fewer checks: only compiled code is checked, when
    it is first used.

    Loading runs the compiled code that the file holds: load only what comes from somebody you
    trust. A damaged file is noticed; a forged one only if it was signed, and ``key`` is given.

    Parameters
    ----------
    path
        Of the file.
    key
        Check the signature with it: the bytes or text that the file was saved with, or the
        ``Ed25519PublicKey`` of the private one.
    strict
        Raise, instead of running the original in PyTorch, where no compiled code serves a call.
        None for what the file was saved with.

    Returns
    -------
    torch.jit.ScriptModule
        It may be called, put inside of other modules, scripted, traced, and saved again. Its
        parameters and buffers are the file's own, under the original names, and require no
        gradients. ``load_state_dict`` takes effect with the next call that begins after it; calls
        on other threads meanwhile see all of the old weights, unless with ``assign=True``.

    Raises
    ------
    ArchiveError
        The file is not one that `tvmify.save` wrote, is damaged, or has not the signature.
    FileNotFoundError
        There is no such file.
    """
    path = Path(path)
    with _opened(path) as file:
        check(file, path, key)
        file.seek(0)
        # The file that was checked, even if another has taken its name meanwhile.
        checked = f"/proc/self/fd/{file.fileno()}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that TorchScript is deprecated
                module = torch.jit.load(checked if Path(checked).exists() else file)
            native = module._tvmify
        except Exception as error:  # PyTorch's reader raises many kinds for what was forged
            raise ArchiveError(f"{path} cannot be loaded: {error}") from error
    if strict is not None:
        native.set_strict(strict)
    # While `load_state_dict` writes to the weights one by one, calls use copies of them. The
    # methods that add hooks are not there for TorchScript, the hooks are.
    module._load_state_dict_pre_hooks[id(native)] = lambda *_: native.hold_weights()
    module._load_state_dict_post_hooks[id(native)] = lambda *_: native.release_weights()
    return module


def inspect(path: str | os.PathLike[str], *, key: Any = None) -> dict[str, Any]:
    """Return the manifest of a saved file, having checked every byte; none of its code is loaded.

    Parameters
    ----------
    path, key
        As for `load`.

    Returns
    -------
    dict
        ``format``; ``versions`` of what saved it; ``model``; ``signatures``: for each program its
        ``arguments``, ``target``, ``needs`` (instruction sets) and ``bytes``; ``tensors``: their
        ``number`` and ``bytes``; ``signed``; ``records``: the parts of the file, each with its
        ``size`` and ``sha256``.

    Raises
    ------
    ArchiveError
        As `load`.
    """
    path = Path(path)
    with _opened(path) as file:
        return check(file, path, key)


def original(module: torch.jit.ScriptModule) -> Any:
    """Return what a loaded module was before it was saved; another module as it is.

    The two share the memory of their tensors.

    Raises
    ------
    SaveError
        It was not scripted, and the file holds a record for its shapes only.
    """
    if not hasattr(module, "_tvmify"):
        return module
    if not module._tvmify.interprets_all():
        raise SaveError(
            f"{module.original_name} was saved without being scripted: decorate, or save, the "
            "model that the file was made of"
        )
    return _recursive.wrap_cpp_module(with_method_renamed(module, ORIGINAL, "forward"))


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except NotRegular as error:
        raise ArchiveError(f"{path} is not loaded: it is no regular file") from error
