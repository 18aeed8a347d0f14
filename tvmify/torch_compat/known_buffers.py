"""The elements of buffers in code that is recorded, which branches may depend on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from tvmify.errors import SET_ATTRIBUTE, UnsupportedOperator
from tvmify.torch_compat.memory import has_memory
from tvmify.torch_compat.recording_mode import RecordingMode

_PLAIN = (torch.Tensor, torch.nn.Buffer)
#: Of a buffer whose values decide what is recorded: a flag, or one for each column of a table.
_MOST_ELEMENTS = 64
_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@contextlib.contextmanager
def known_buffers(
    recorded: Mapping[str, torch.Tensor], real: Mapping[str, torch.Tensor], read: set[str]
) -> Iterator[None]:
    """Let code that is recorded read small buffers, and what is computed from them, such as a flag
    that says whether a codebook was initialized; use inside `tracing`.

    Parameters
    ----------
    recorded
        The buffers as the code finds them. One is no longer known once it is written to.
    real
        The same buffers of the module.
    read
        Gets the names of those whose elements the code asked for.

    Raises
    ------
    UnsupportedOperator
        The code also writes to one that it asked for.
    """
    known: dict[str, FakeTensor] = {}
    for name, fake in recorded.items():
        value = real.get(name)
        if isinstance(fake, FakeTensor) and value is not None and is_small(value):
            with _disable_current_modes(), torch.inference_mode(False):
                fake.constant = value.detach().clone()
            fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)
            known[name] = fake
    following = _Following(known, read)
    try:
        with following if known else contextlib.nullcontext():
            yield
    finally:
        for fake in known.values():
            fake.constant = None
    for name in sorted(read & following.written):
        reason = f"forward reads the value of {name}, and writes to it"
        raise UnsupportedOperator([SET_ATTRIBUTE], reason)


def is_small(value: torch.Tensor) -> bool:
    """Whether code that is recorded may read the elements of a buffer."""
    return (
        type(value) in _PLAIN
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type == "cpu"
        and value.numel() <= _MOST_ELEMENTS
        and has_memory(value)
    )


class _Following(RecordingMode):
    """Notes which buffers known tensors come from, and which of them are read or written."""

    def __init__(self, known: Mapping[str, FakeTensor], read: set[str]) -> None:
        super().__init__()
        self._names = {place: name for name, fake in known.items() for place in _places(fake)}
        self._sources: Any = WeakIdKeyDictionary()
        for name, fake in known.items():
            self._sources[fake] = frozenset([name])
        self._read = read
        self.written: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call an operator."""
        kwargs = kwargs or {}
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        names = frozenset[str]().union(*(self._sources.get(x, ()) for x in leaves))
        if isinstance(func, OpOverload):
            if not _VALUES.isdisjoint(func.tags):
                self._read |= names
            if func._schema.is_mutable:
                self.written |= self._written(func, args, kwargs)
        if names and isinstance(func, OpOverload) and func.is_view:
            result = _view(func, args, kwargs, leaves)
        else:
            result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result) if names else ():
            if isinstance(leaf, FakeTensor) and leaf.constant is not None:
                self._sources[leaf] = names
        return result

    def _written(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> set[str]:
        arguments = func._schema.arguments
        given = {spec.name: value for spec, value in zip(arguments, args, strict=False)} | kwargs
        targets = [given.get(spec.name) for spec in arguments if _is_written(spec)]
        fakes = [x for x in pytree.tree_leaves(targets) if isinstance(x, FakeTensor)]
        return {self._names[place] for x in fakes for place in _places(x) if place in self._names}


def _view(func: Any, args: Any, kwargs: Any, leaves: list[FakeTensor]) -> Any:
    """Call a view operator without known elements, and give the result those of the view.

    With them, PyTorch returns a tensor of its own, which does not share the buffer's memory.
    """
    known = [leaf.constant for leaf in leaves]
    real = pytree.tree_map_only(FakeTensor, lambda fake: fake.constant, (args, kwargs))
    is_symbolic = any(isinstance(x, py_sym_types) for x in pytree.tree_leaves(real))
    try:
        for leaf in leaves:
            leaf.constant = None
        result = func(*args, **kwargs)
    finally:
        for leaf, constant in zip(leaves, known, strict=True):
            leaf.constant = constant
    if None in known or is_symbolic:
        return result
    with _disable_current_modes(), torch.inference_mode(False):
        elements = func(*real[0], **real[1])
    fakes, constants = pytree.tree_leaves(result), pytree.tree_leaves(elements)
    for fake, constant in zip(fakes, constants, strict=True):
        fake.constant = constant
        fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)
    return result


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _places(fake: FakeTensor) -> list[int]:
    """Return values that views of one tensor share; those of a known one have a storage each."""
    known = [] if fake.constant is None else [fake.constant]
    return [tensor.untyped_storage()._cdata for tensor in (fake, *known)]
