"""Messages to and from the compiler process: JSON and bytes.

A program is serialized by ``torch.export``, without the elements of weights, which do not matter,
and without the structure of its arguments and results, which may have classes of this process.
"""

from __future__ import annotations

import copy
import io
import json
import struct
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from tvmify.artifact.structure import structure_text
from tvmify.torch_compat.dtypes import dtype_name
from tvmify.torch_compat.recurrent_shapes import recurrent_shapes
from tvmify.torch_compat.silence import silenced
from tvmify.torch_compat.tracing import fake_modes

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_LENGTHS = struct.Struct("<QQ")
_WEIGHTS = "weights.json"


class Message(NamedTuple):
    """A message: values that JSON can express, and bytes."""

    header: dict[str, Any]
    content: bytes = b""


def send(pipe: IO[bytes], message: Message) -> None:
    """Write a message."""
    head, content = json.dumps(message.header).encode(), message.content
    for part in (_LENGTHS.pack(len(head), len(content)), head, content):
        left = memoryview(part)
        while left:
            left = left[pipe.write(left) :]  # an unbuffered pipe may accept a part only
    pipe.flush()


def receive(pipe: IO[bytes]) -> Message:
    """Read a message.

    Raises
    ------
    EOFError
        The message is missing or incomplete.
    """
    head, content = (_read(pipe, length) for length in _LENGTHS.unpack(_read(pipe, _LENGTHS.size)))
    return Message(json.loads(head), content)


def _read(pipe: IO[bytes], length: int) -> bytes:
    content = bytearray(length)
    left = memoryview(content)
    while left:
        count = pipe.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise EOFError("the other process has ended")
        left = left[count:]
    return bytes(content)


# ------------------------------------------------------------------------------------ programs


def pack(program: ExportedProgram) -> bytes:
    """Serialize a program; raises torch's error if that is not possible."""
    from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature

    weights: dict[str, Any] = {}
    placeholders: dict[str, torch.Tensor] = {}
    numbers: dict[int, int] = {}
    for name, tensor in program.state_dict.items():
        number = numbers.setdefault(id(tensor), len(numbers))
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        weights[name] = [
            number,
            is_parameter,
            tensor.requires_grad,
            list(tensor.shape),
            list(tensor.stride()),
        ]
        placeholder = torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)
        is_checked = torch.nn.Parameter(placeholder, requires_grad=False)  # by torch
        placeholders[name] = is_checked if is_parameter else placeholder
    entry = program.module_call_graph[0]
    results = entry.signature.out_spec.num_leaves if entry.signature else 0
    flat = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=pytree.tree_structure(((0,) * len(program.graph_signature.user_inputs), {})),
        out_spec=pytree.tree_structure((0,) * results),
    )
    bare = copy.copy(program)
    bare._module_call_graph = [ModuleCallEntry(fqn="", signature=flat)]
    bare._state_dict = placeholders
    bare._example_inputs = None
    file = io.BytesIO()
    with silenced():  # the elements of weights are missing
        torch.export.save(bare, file, extra_files={_WEIGHTS: json.dumps(weights)})
    return file.getvalue()


def unpack(content: bytes) -> ExportedProgram:
    """Read a program that `pack` wrote; its weights are uninitialized tensors."""
    extra = {_WEIGHTS: ""}
    program = torch.export.load(io.BytesIO(content), extra_files=extra)
    tensors: dict[int, torch.Tensor] = {}
    for name, (number, is_parameter, needs_grad, shape, strides) in json.loads(
        extra[_WEIGHTS]
    ).items():
        if number not in tensors:
            dtype = program.state_dict[name].dtype
            tensor = torch.empty_strided(shape, strides, dtype=dtype)
            tensors[number] = (
                torch.nn.Parameter(tensor, requires_grad=needs_grad) if is_parameter else tensor
            )
        program.state_dict[name] = tensors[number]
    _propagate(program)
    return program


def _propagate(program: ExportedProgram) -> None:
    """Compute the fake values of all nodes again.

    `torch.export.load` gives each its own memory: it does not say which are views of others.
    """
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    for mode in fake_modes(program.graph):  # a single one, or none
        with torch.no_grad(), recurrent_shapes():
            FakeTensorProp(program.graph_module, mode).propagate_dont_convert_inputs(*values)


def output_structure(program: ExportedProgram) -> dict[str, str]:
    """Return the field of an artifact that an unpacked program lacks."""
    structure = program.call_spec.out_spec
    assert structure is not None
    return {"output_structure": structure_text(structure)}


# --------------------------------------------------------------------------------------- modes


def modes() -> dict[str, Any]:
    """Return torch's modes that affect the compiler."""
    return {
        "default dtype": dtype_name(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }


def enter(wanted: dict[str, Any]) -> None:
    """Set these modes."""
    torch.set_default_dtype(getattr(torch, wanted["default dtype"]))
    torch.use_deterministic_algorithms(wanted["deterministic"], warn_only=wanted["warn only"])
    torch.set_float32_matmul_precision(wanted["float32 matmul precision"])
