"""Saved files: TorchScript archives that ``torch.jit.load`` can read too."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.jit import _recursive

from tvmify.errors import ArchiveError, SaveError
from tvmify.options import check_path
from tvmify.runtime.manifest import check, seal

# This import also registers the classes that archives contain.
from tvmify.runtime.native import with_method_renamed
from tvmify.system.regular_files import NotRegular, open_regular
from tvmify.system.replacing import replacing
from tvmify.system.zip_records import AmbiguousArchive

#: The method in which a saved module keeps its original forward.
ORIGINAL = "_tvmify_eager"


def write(
    module: torch.jit.ScriptModule, path: Path, description: Mapping[str, Any], key: Any = None
) -> None:
    """Write a module and its manifest to a file, atomically.

    Parameters
    ----------
    module
        What ``torch.jit.load`` should return.
    path
        The file; an existing one is replaced.
    description
        Fields of the manifest besides format and digests, as JSON values.
    key
        Signs the manifest, see `tvmify.save`.
    """
    try:
        with replacing(path) as file:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that TorchScript is deprecated
                _save(module, file)
            seal(file, description, key)
    except AmbiguousArchive as error:
        raise SaveError(f"PyTorch could not read every record of {path}: {error}") from error


def _save(module: torch.jit.ScriptModule, file: Any) -> None:
    try:
        torch.jit.save(module, file)
    except RuntimeError as error:
        if "Could not export Python function" not in str(error):
            raise
        name = str(error).partition("'")[2].partition("'")[0]
        raise SaveError(
            f"the module calls {name!r}, a torch.autograd.Function, which a file cannot contain: "
            "call what computes the same without it when gradients are off"
        ) from error


def load(path: str | os.PathLike[str], *, key: Any = None, strict: bool | None = None) -> Any:
    """Load a file that `tvmify.save` wrote, after checking every byte of it.

    ``torch.jit.load`` reads the same file with fewer checks: it checks only the compiled code, when
    that is first used.

    Loading runs the compiled code in the file, so load only files that you trust. Damage is always
    detected; forgery only if the file was signed and ``key`` is given.

    Parameters
    ----------
    path
        The file to load.
    key
        Key that checks the signature: the bytes or text that the file was saved with, or the
        ``Ed25519PublicKey`` that matches the private key.
    strict
        Raise, instead of running the original in PyTorch, if no compiled code serves a call. None
        for the value that the file was saved with.

    Returns
    -------
    torch.jit.ScriptModule
        A module that can be called, used inside other modules, scripted, traced, and saved again.
        Its parameters and buffers come from the file, keep their original names, and require no
        gradients. ``load_state_dict`` takes effect for calls that begin after it; concurrent calls
        on other threads see only old weights, except with ``assign=True``.

    Raises
    ------
    ArchiveError
        The file was not written by `tvmify.save`, is damaged, or does not have a valid signature.
    FileNotFoundError
        There is no such file.

    Examples
    --------
    >>> net = tvmify.load("net.pt", strict=True)  # no call runs in PyTorch unnoticed
    >>> with torch.inference_mode():
    ...     y = net(torch.randn(8, 64))  # float32[8, 10]
    """
    check_path(path, "load(path), with the path of a file that tvmify.save wrote")
    path = Path(path)
    with _opened(path) as file:
        check(file, path, key)
        file.seek(0)
        # The file that was checked, even if another has since taken its name.
        checked = f"/proc/self/fd/{file.fileno()}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that TorchScript is deprecated
                module = torch.jit.load(checked if Path(checked).exists() else file)
            native = module._tvmify
        except Exception as error:  # PyTorch's reader raises many types for malformed files
            raise ArchiveError(f"{path} cannot be loaded: {error}") from error
    if strict is not None:
        native.set_strict(strict)
    # While `load_state_dict` writes the weights one by one, calls use copies. TorchScript modules
    # lack the methods that add hooks, but run the hooks.
    module._load_state_dict_pre_hooks[id(native)] = lambda *_: native.hold_weights()
    module._load_state_dict_post_hooks[id(native)] = lambda *_: native.release_weights()
    return module


def inspect(path: str | os.PathLike[str], *, key: Any = None) -> dict[str, Any]:
    """Check every byte of a saved file and return its manifest; none of its code is loaded.

    Parameters
    ----------
    path, key
        As for `load`.

    Returns
    -------
    dict
        ``format``; ``versions`` of what saved it; ``model``; ``signatures``: for each program its
        ``arguments``, ``target``, ``needs`` (instruction sets) and ``bytes``; ``tensors``: their
        ``number`` and ``bytes``; ``signed``; ``records``: the records of the archive, each with its
        ``size`` and ``sha256``.

    Raises
    ------
    ArchiveError
        As `load`.

    Examples
    --------
    >>> [program["needs"] for program in tvmify.inspect("net.pt")["signatures"]]
    """
    check_path(path, "inspect(path), with the path of a file that tvmify.save wrote")
    path = Path(path)
    with _opened(path) as file:
        return check(file, path, key)


def original(module: torch.jit.ScriptModule) -> Any:
    """Return the original of a loaded module; any other module is returned unchanged.

    The two modules share the memory of their tensors.

    Raises
    ------
    SaveError
        It was saved without being scripted, so the file only has traces for particular shapes.
    """
    if not hasattr(module, "_tvmify"):
        return module
    if not module._tvmify.interprets_all():
        raise SaveError(
            f"{module.original_name} was saved without being scripted: decorate, or save, the "
            "model from which the file was made"
        )
    return _recursive.wrap_cpp_module(with_method_renamed(module, ORIGINAL, "forward"))


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except NotRegular as error:
        raise ArchiveError(f"{path} is not loaded: it is not a regular file") from error
