"""The elements of buffers in code that is recorded, which branches may depend on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from tvmify.errors import SET_ATTRIBUTE, UnsupportedOperator
from tvmify.torch_compat.memory import has_memory
from tvmify.torch_compat.recording_mode import RecordingMode

_PLAIN = (torch.Tensor, torch.nn.Buffer)
_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@contextlib.contextmanager
def known_buffers(
    recorded: Mapping[str, torch.Tensor], real: Mapping[str, torch.Tensor], read: set[str]
) -> Iterator[None]:
    """Let code that is recorded read buffers of one element, and what is computed from them, such
    as a flag that says whether a codebook was initialized; use inside `tracing`.

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
        if isinstance(fake, FakeTensor) and value is not None and _is_small(value):
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


def _is_small(value: torch.Tensor) -> bool:
    return (
        type(value) in _PLAIN
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type == "cpu"
        and value.numel() == 1
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


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _places(fake: FakeTensor) -> list[int]:
    """Return values that views of one tensor share; those of a known one have a storage each."""
    known = [] if fake.constant is None else [fake.constant]
    return [tensor.untyped_storage()._cdata for tensor in (fake, *known)]
