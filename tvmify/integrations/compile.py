"""``tvmify.compile``: a model as a compiled TorchScript module, in the form of TVM's RFC 0025."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tvmify.artifact.results import tensors_among
from tvmify.decorate.decorated import is_decorated, saved_method
from tvmify.decorate.decorator import is_exported, tvmify
from tvmify.dispatch.examples import Example
from tvmify.errors import OptionError
from tvmify.integrations.compile_option import INPUT_INFOS, CompileOption, InputInfo, wrong_value
from tvmify.options import CompileOptions
from tvmify.runtime import load, original
from tvmify.saved.exported import has_symbols
from tvmify.saved.form import Call, CompiledCall
from tvmify.saved.saving import compile_calls, known_calls, write_saved
from tvmify.signature import TensorSpec

#: Name of the file in ``export_dir``.
FILE = "model.pt"


def compile(model: Any, option: Mapping[str, Any] | None = None) -> torch.jit.ScriptModule:
    """Compile a model into a TorchScript module that needs no compiler.

    The result holds the weights, the compiled code, and the original, which runs in PyTorch where
    there is no code for a call. It can be a part of other modules, which ``torch.jit.script`` and
    ``torch.jit.save`` take; where they are loaded, only ``import tvmify.runtime`` is needed, or in
    C++ ``libtvmify``.

    Parameters
    ----------
    model
        A module or function in evaluation mode, a TorchScript module, or a
        ``torch.export.ExportedProgram``. It is not changed.
    option
        A dict with these keys, all of which may be left out:

        ``input_infos``
            For each input its name and its shape, ``[("x", (1, 3, 224, 224))]``, and its dtype if
            it is not ``default_dtype``, ``("ids", (1, 128), "int64")``; a list of such lists
            compiles for several kinds of calls. Names are those of ``forward``'s parameters; if
            none matches, inputs are taken in order. Needed, unless the model is an exported
            program, which is compiled for the calls that it was exported for, or is decorated and
            was called.
        ``default_dtype``
            ``"float32"``, ``"float16"`` or ``"bfloat16"``: the dtype of weights and inputs. A model
            of another dtype is copied and converted. Without it, the dtype of the weights.
        ``num_outputs``
            The expected number of tensors in the result.
        ``tuning_n_trials``
            0, the default, for no tuning. Any other number times a few candidates for each kernel,
            in about 20 seconds (``tune="quick"``).
        ``tuning_log_file``
            A file to which the results of tuning are appended, one line of JSON per program.
        ``export_dir``
            A folder that gets the result as ``model.pt``, in the form of `tvmify.save`.
        ``target``
            What to build for, as the option of `tvmify.tvmify`.
        ``device``
            Where the weights are, and the inputs; by default where the weights are now.

    Returns
    -------
    torch.jit.ScriptModule
        What `tvmify.load` returns for such a file, with its own copy of the weights.

    Raises
    ------
    OptionError
        A key or its value is wrong; the message lists the valid ones.
    SaveError
        Nothing could be compiled, or the model has no TorchScript form. The message says why.
    TypeError
        The model is none of these.

    Warns
    -----
    TvmifyWarning
        One of several kinds of calls cannot be compiled, and why.

    Examples
    --------
    >>> option = {"input_infos": [("x", (1, 3, 224, 224))], "export_dir": "compiled"}
    >>> fast = tvmify.compile(torch.jit.trace(resnet, image), option)
    >>> fast(image)  # float32[1, 1000]
    """
    if model is None or inspect.isclass(model) or isinstance(model, (str, os.PathLike)):
        raise TypeError(
            f"cannot compile {model!r}: give an instance of a class, or what torch.jit.load "
            "returns for a path"
        )
    chosen = CompileOption.of(option)
    converted = _converted(model, chosen)
    subject = tvmify(converted, **_decoration(model, chosen))
    dispatcher = saved_method(subject)
    parameters = _parameters(dispatcher.subject.captured())
    dtype, device = chosen.default_dtype or _dtype_of(converted), _device_of(converted, chosen)
    calls = [_call(infos, parameters, dtype, device) for infos in chosen.input_infos]
    calls = calls or _known_calls(model)
    programs = compile_calls(dispatcher, [Example(*call) for call in calls], (None,))
    for program in programs:
        _check_outputs(program, chosen.num_outputs)
    if chosen.tuning_log_file is not None:
        _log_tuning(programs, chosen.tuning_log_file)
    with _directory(chosen.export_dir) as directory:
        write_saved(dispatcher, programs, directory / FILE, strict=False, key=None)
        return load(directory / FILE)


# ------------------------------------------------------------------------------- model and calls


def _converted(model: Any, chosen: CompileOption) -> Any:
    """Return the model with weights of the chosen dtype and device: itself, or a copy."""
    dtype, device = chosen.default_dtype, chosen.device
    if is_exported(model):
        _check_exported(model, chosen)
        return model
    if not isinstance(model, nn.Module):
        return model
    if all(
        (dtype is None or not tensor.is_floating_point() or tensor.dtype == dtype)
        and (device is None or tensor.device == device)
        for tensor in _tensors(model)
    ):
        return model
    plain = original(model) if isinstance(model, torch.jit.ScriptModule) else model
    return copy.deepcopy(plain).to(device=device, dtype=dtype)


def _check_exported(program: Any, chosen: CompileOption) -> None:
    """Compare the choices with the dtypes and devices that a program was recorded with."""
    for name, wanted in (("default_dtype", chosen.default_dtype), ("device", chosen.device)):
        for tensor in program.state_dict.values():
            found = tensor.device if name == "device" else tensor.dtype
            if wanted not in (None, found) and (name == "device" or tensor.is_floating_point()):
                raise wrong_value(name, wanted, f"{found}, for which the program was exported")


def _decoration(model: Any, chosen: CompileOption) -> dict[str, Any]:
    """Return the options for the decorator: those of the model, updated with the chosen ones."""
    options = saved_method(model).subject.options if is_decorated(model) else CompileOptions()
    if is_exported(model) and has_symbols(model):
        options = dataclasses.replace(options, dynamic=True)
    if chosen.target is not None:
        options = dataclasses.replace(options, target=chosen.target)
    if chosen.tuning_n_trials:
        options = dataclasses.replace(options, tune="quick")
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _dtype_of(model: Any) -> torch.dtype:
    weights = _tensors(model) if isinstance(model, nn.Module) else ()
    return next((w.dtype for w in weights if w.is_floating_point()), torch.float32)


def _device_of(model: Any, chosen: CompileOption) -> torch.device:
    weights = _tensors(model) if isinstance(model, nn.Module) else ()
    return chosen.device or next((w.device for w in weights), torch.get_default_device())


def _parameters(captured: Any) -> list[str]:
    """Return the names of the parameters of a forward, or of a function."""
    forward = captured.forward if isinstance(captured, nn.Module) else captured
    if (schema := getattr(forward, "schema", None)) is not None:  # of TorchScript
        return [argument.name for argument in schema.arguments if argument.name != "self"]
    return list(inspect.signature(forward).parameters)


def _call(
    infos: Sequence[InputInfo], parameters: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Call:
    """Return zeros of these shapes as arguments."""
    tensors = {
        info.name: TensorSpec(info.shape, info.dtype or dtype, device).example() for info in infos
    }
    unknown = [name for name in tensors if name not in parameters]
    if not unknown:
        return (), tensors
    if len(unknown) < len(tensors) or len(tensors) > len(parameters):
        raise OptionError(
            f"option 'input_infos' names {unknown[0]!r}: the parameters are {', '.join(parameters)}"
        )
    return tuple(tensors.values()), {}  # TVM's importer allows any names, and goes by the order


def _known_calls(model: Any) -> list[Call]:
    calls = known_calls(model)
    if not calls:
        raise OptionError(f"option 'input_infos' is needed: give {INPUT_INFOS}")
    return calls


# ------------------------------------------------------------------------------------ the results


def _check_outputs(program: CompiledCall, expected: int | None) -> None:
    given = [isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(program.call)]
    found = sum(tensors_among(program.artifact.outputs, given))
    if expected not in (None, found):
        raise wrong_value("num_outputs", expected, f"{found}, as many tensors as it returns")


def _log_tuning(programs: Sequence[CompiledCall], path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        for _, artifact in programs:
            if (tuned := artifact.report.get("tuning")) is not None:
                file.write(json.dumps({"target": json.loads(artifact.target)} | tuned) + "\n")


@contextmanager
def _directory(chosen: Path | None) -> Iterator[Path]:
    if chosen is not None:
        yield chosen
        return
    with tempfile.TemporaryDirectory(prefix="tvmify-") as temporary:
        yield Path(temporary)
