"""``tvmify.save``: a TorchScript file with compiled code, weights, and the original module."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmify.decorate.decorated import example_calls, is_decorated, saved_method
from tvmify.decorate.decorator import is_exported, tvmify
from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.dispatch.examples import Example
from tvmify.errors import Divisible, NotCompiled, OptionError, SaveError, TvmifyWarning
from tvmify.options import check_path
from tvmify.runtime import write_archive
from tvmify.saved.effects import refuse_effects
from tvmify.saved.exported import exported_call, has_symbols
from tvmify.saved.form import Call, CompiledCall, saved_form
from tvmify.target import Target, TargetOption


def save(
    model: Any,
    path: str | os.PathLike[str],
    *,
    example_inputs: Any = None,
    signatures: Sequence[Any] = (),
    targets: Sequence[TargetOption] = (None,),
    strict: bool = False,
    key: Any = None,
) -> None:
    """Compile a model, and write it to a TorchScript file that runs without the compiler.

    The file contains the weights once, compiled code for each signature and target, and the model
    in TorchScript, which runs every call that the compiled code does not serve. Of several
    decorated methods, it contains only ``forward``. Load it with `tvmify.load`, with
    ``torch.jit.load`` after ``import tvmify.runtime``, or in C++.

    Parameters
    ----------
    model
        A decorated module or function, or a plain one, in evaluation mode; or a
        ``torch.export.ExportedProgram``. It is not changed.
    path
        Path of the file. An existing file is replaced once the new one is complete.
    example_inputs
        Arguments of one call: a tensor, a tuple of positional arguments, or a dict of keyword
        arguments. Their values do not matter, but shapes, dtypes and devices do.
    signatures
        More calls, in the forms that `warmup` takes, such as ``[[(1, 3, 224, 224)]]``. A size may
        be a ``torch.export.Dim``: the file serves all sizes within its limits. Without
        ``signatures`` and ``example_inputs``: every signature that the model has been called with,
        or the calls that an exported program was exported for. Where one program serves all values
        of a float, the first value is saved. Calls that run a program with symbolic sizes are
        saved as that program, in all classes of sizes compiled so far.
    targets
        What to build for, each like the option ``target``. None is the model's own target, by
        default this machine. A machine that can run several uses the first; of several for GPUs,
        the one for the newest architecture. A dict without ``mattr`` means the instruction sets of
        this machine, whatever its ``mcpu`` is.
    strict
        After loading, raise an error for a call that no compiled code serves, instead of a
        warning and running the original. `load` can override it.
    key
        Sign the file with bytes or a string (HMAC), or with an ``Ed25519PrivateKey`` of the
        package ``cryptography``. `load` checks the signature if it is given the key.

    Raises
    ------
    OptionError
        ``path`` is not a path, ``model`` is one, or ``targets`` is not a list.
    SaveError
        No call is known (give ``example_inputs`` or ``signatures``); ``forward`` is not decorated
        (add it to ``methods=``); nothing could be compiled; the model has no TorchScript form, or
        writes to its buffers or arguments (pass the tensor as an argument and return its new
        value). The message says which.

    Warns
    -----
    TvmifyWarning
        The file has no compiled code for some of the calls, and why.

    Examples
    --------
    >>> tvmify.save(net, "net.pt", example_inputs=torch.randn(8, 64))
    >>> tvmify.save(net, "net.pt", signatures=[[(1, 64)], [(8, 64)]], key="secret")
    """
    check_path(path, "save(model, path)")
    if not isinstance(targets, (list, tuple)):
        raise OptionError(f"targets is {targets!r}: expected a list, such as [{targets!r}]")
    is_open = is_exported(model) and has_symbols(model)
    subject = model if is_decorated(model) else tvmify(model, dynamic=is_open)
    dispatcher = saved_method(subject)
    calls = [call for signature in signatures for call in example_calls(dispatcher, signature)]
    if example_inputs is not None:
        calls = [*example_calls(dispatcher, example_inputs, shapes=False), *calls]
    calls = calls or [Example(*call) for call in known_calls(model)]
    programs = compile_calls(dispatcher, calls, targets)
    write_saved(dispatcher, programs, Path(path), strict=strict, key=key)


def known_calls(model: Any) -> list[Call]:
    """Return the known calls of a model: those so far, or those that it was exported for."""
    if is_exported(model):
        return [exported_call(model)]
    return saved_method(model).examples() if is_decorated(model) else []


def write_saved(
    dispatcher: Dispatcher, programs: Sequence[CompiledCall], path: Path, *, strict: bool, key: Any
) -> None:
    """Write what `compile_calls` returned to a file; see `save`."""
    captured = dispatcher.subject.captured()
    form = saved_form(captured, dispatcher.subject.name, programs, strict)
    write_archive(form.module, path, form.description, key)


def _distinct(leaf: Any) -> Any:
    # Copy, so that a tensor that is passed twice becomes two, each with its own name.
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def compile_calls(
    dispatcher: Dispatcher, calls: Sequence[Example], targets: Sequence[TargetOption]
) -> list[CompiledCall]:
    """Compile for each call and target; warn of those that cannot be compiled.

    Raises
    ------
    SaveError
        There are no calls; nothing could be compiled; or the program has side effects.
    """
    name = dispatcher.subject.name
    if not calls:
        raise SaveError(
            f"{name} was not called yet, so there are no shapes to compile it for: "
            "give example_inputs, or signatures"
        )
    compiled: list[CompiledCall] = []
    refused: list[NotCompiled] = []
    for call in calls:
        args, kwargs = pytree.tree_map(_distinct, (call.args, call.kwargs))
        for target in targets:
            try:
                artifacts = dispatcher.compiled_for_file(args, kwargs, target, call.declared)
            except NotCompiled as reason:
                refused.append(reason)
                continue
            for artifact in artifacts:
                refuse_effects(name, artifact, "saved")
                compiled.append(CompiledCall((args, kwargs), artifact))
    if not compiled:
        if refused[0].divisible is Divisible.BY_REGIONS:
            raise SaveError(
                f"{name} runs by regions, which are compiled in the process that calls "
                f"them and cannot be saved, since {refused[0].reason}. Save its submodules, or "
                "decorate the module where it is loaded"
            )
        raise SaveError(f"nothing of {name} could be compiled: {refused[0]}")
    for reason in dict.fromkeys(map(str, refused)):
        message = f"{name} is saved without compiled code for a call: {reason}"
        warnings.warn(message, TvmifyWarning, stacklevel=3)
    # A GPU also runs code for older ones, but its driver has to compile it again.
    return sorted(compiled, key=lambda one: -Target.parse(one.artifact.target).generation)
