"""The signature of a call: everything about its arguments except the values of tensors."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from tvmify.errors import UnsupportedInput, UnsupportedObject
from tvmify.torch_compat.declared_sizes import is_dim
from tvmify.torch_compat.dtypes import dtype_name
from tvmify.torch_compat.memory import has_memory

#: The arguments of a call.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]

#: Dtypes that compiled code supports; calls with others run in eager.
SUPPORTED_DTYPES = frozenset(
    {
        torch.complex128,
        torch.complex64,
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
_SCALARS = (type(None), bool, int, float, str, torch.dtype, torch.device)
_LAZY = "a view with a pending negation or conjugation"
#: Largest magnitude of an int that can be a program argument; larger ones are part of the key.
LARGEST_INT = 2**31 - 1
#: The largest finite float that fits into float32; some operators raise an error for larger ones.
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True)
class NumberArgument:
    """Stands, in a call's arguments, for any float that fits into float32, or any int up to
    `LARGEST_INT`.

    Attributes
    ----------
    kind
        ``float`` or ``int``.
    """

    kind: type

    def example(self) -> float:
        """Return such a number."""
        return self.kind(1)


FLOAT, INT = NumberArgument(float), NumberArgument(int)


@dataclass(frozen=True)
class SizeArgument(NumberArgument):
    """Stands for an int that is recorded as a size: that of a tensor without elements, which is
    passed in its place.

    Attributes
    ----------
    value
        The int in the call at hand.
    """

    kind: type = field(default=int, init=False)
    value: int = field(default=0, compare=False)

    def example(self) -> int:
        """Return the int in the call at hand."""
        return self.value

    @staticmethod
    def carrier(value: int) -> torch.Tensor:
        """Return the tensor that is passed for an int."""
        return torch.empty((value, 0), dtype=torch.uint8, device="cpu")


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a tensor.

    Attributes
    ----------
    shape
        Sizes, outermost first. Those that `warmup` takes may be ``torch.export.Dim``.
    dtype
        Element type.
    device
        Where the tensor is.

    Examples
    --------
    >>> net.warmup([TensorSpec((1, 128), torch.int64), TensorSpec((1, 128))])
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")

    def __post_init__(self) -> None:
        # Users pass lists and strings; converting them makes specs comparable.
        shape = (size if is_dim(size) else int(size) for size in self.shape)
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "device", torch.device(self.device))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def with_sizes(self, sizes: Sequence[object]) -> VaryingSpec:
        """Return the same with other sizes: numbers, and names of symbols or terms of them."""
        shape = tuple(size if isinstance(size, int) else 0 for size in sizes)
        names = tuple(None if isinstance(size, int) else str(size) for size in sizes)
        return VaryingSpec(shape, self.dtype, self.device, names)

    def example(self) -> torch.Tensor:
        """Return such a tensor, filled with zeros, which are valid indices for any embedding."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def text(self, device: str) -> str:
        """Describe the tensor as if it were on another device."""
        return f"{dtype_name(self.dtype)}{list(self.shape)} {device}"

    def __str__(self) -> str:
        return self.text(str(self.device))


@dataclass(frozen=True)
class VaryingSpec(TensorSpec):
    """A tensor some of whose sizes are symbols.

    Attributes
    ----------
    shape
        With 0 for the sizes that are symbols.
    names
        The names of the symbols; None for each size that is a number.
    """

    names: tuple[str | None, ...] = ()

    def text(self, device: str) -> str:
        """Describe the tensor as if it were on another device."""
        pairs = zip(self.shape, self.names, strict=True)
        sizes = ", ".join(str(size) if name is None else name for size, name in pairs)
        return f"{dtype_name(self.dtype)}[{sizes}] {device}"

    def __str__(self) -> str:
        return super().__str__()


@dataclass(frozen=True)
class IntSpec(VaryingSpec):
    """An int that is recorded as a size; see `SizeArgument`."""

    @classmethod
    def of_value(cls, value: int) -> IntSpec:
        """Describe an int."""
        spec = TensorSpec.of(SizeArgument.carrier(value))
        return cls(spec.shape, spec.dtype, spec.device, (None, None))

    def with_sizes(self, sizes: Sequence[object]) -> VaryingSpec:
        """Return the same with another value, which may be a term."""
        spec = super().with_sizes(sizes)
        return IntSpec(spec.shape, spec.dtype, spec.device, spec.names)

    def text(self, device: str) -> str:
        """Describe it for a key, which tells it from an int that is a constant."""
        return f"size {self.names[0] or self.shape[0]}"

    def __str__(self) -> str:
        return f"int {self.names[0] or self.shape[0]}"


@dataclass(frozen=True)
class Signature:
    """The leaves of a call's arguments, and their structure.

    Attributes
    ----------
    structure
        The pytree of ``(args, kwargs)``, as text.
    leaves
        For each leaf a `TensorSpec`, or the text of a non-tensor value.
    """

    structure: str
    leaves: tuple[TensorSpec | str, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
        """Describe the arguments of a call.

        Raises
        ------
        UnsupportedInput
            A leaf is neither a plain dense tensor of a supported dtype nor a Python scalar.
        """
        paths, structure = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        leaves = tuple(_describe(pytree.keystr(path), leaf) for path, leaf in paths)
        return cls(str(structure), leaves)

    def with_symbols(self, axes: Mapping[int, tuple[str | None, ...]]) -> Signature:
        """Replace sizes by symbols: of a leaf by its number, a name or None for each axis."""
        leaves = tuple(
            leaf.with_sizes([name or size for name, size in zip(axes[i], leaf.shape, strict=True)])
            if isinstance(leaf, TensorSpec) and i in axes
            else leaf
            for i, leaf in enumerate(self.leaves)
        )
        return replace(self, leaves=leaves)

    def with_sizes(self, sizes: Mapping[int, Sequence[object]]) -> Signature:
        """Replace the sizes of leaves, by number, by those of a program, which may be terms."""
        leaves = list(self.leaves)
        for i, shape in sizes.items():
            if isinstance(spec := leaves[i], TensorSpec):
                leaves[i] = spec.with_sizes(shape)
        return replace(self, leaves=tuple(leaves))

    @property
    def devices(self) -> set[torch.device]:
        """The devices of the tensors."""
        return {leaf.device for leaf in self.leaves if isinstance(leaf, TensorSpec)}

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.leaves))})"

    def key_text(self, device: str) -> str:
        """Return the numbered leaves, one per line, and the structure.

        Parameters
        ----------
        device
            Device type to write for all tensors: that of the program.
        """
        texts = (x.text(device) if isinstance(x, TensorSpec) else x for x in self.leaves)
        leaves = (f"{number}: {text}" for number, text in enumerate(texts))
        return "\n".join([*leaves, self.structure])


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that compiled code would misread or crash on.

    Raises
    ------
    UnsupportedInput
        The tensor is a subclass, not dense, quantized, or wrapped by functorch.
    """
    kind = _unsupported_kind(tensor)
    if kind is not None:
        raise UnsupportedInput(
            f"{name} is {kind}",
            "Pass a plain dense tensor.",
            argument=name,
            kind=kind,
        )


def check_weight(name: str, weight: torch.Tensor) -> None:
    """Refuse a weight that compiled code cannot read.

    Arguments without memory have ordinary signatures, so they are refused when the program runs.

    Raises
    ------
    UnsupportedInput
        `check_tensor` refuses it, it is conjugated or negated without a copy, or has no memory.
    """
    check_tensor(name, weight)
    if weight.is_neg() or weight.is_conj():
        raise UnsupportedInput(
            f"{name} is {_LAZY}", "Call .resolve_neg().resolve_conj().", argument=name, kind=_LAZY
        )
    if not has_memory(weight):
        raise UnsupportedInput(
            f"{name} has no storage, or less than its shape needs",
            "Allocate its memory before the call: compiled code reads it in place.",
        )


def unreadable_kind(weight: torch.Tensor) -> str | None:
    """Return why `check_weight` refuses a weight; None if it does not."""
    if (kind := _unsupported_kind(weight)) is not None:
        return kind
    if weight.is_neg() or weight.is_conj():
        return _LAZY
    return None if has_memory(weight) else "without memory"


def _unsupported_kind(tensor: torch.Tensor) -> str | None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}, a subclass of Tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # type: ignore[attr-defined]
        return "a tensor inside a torch.func transform"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype})"
    if tensor.dtype not in SUPPORTED_DTYPES:
        return f"a tensor of dtype {tensor.dtype}"
    if tensor.numel() >= 2**31:
        return f"a tensor of {tensor.numel()} elements, too many for compiled indices"
    return None


def _describe(path: str, leaf: Any) -> TensorSpec | str:
    # The path is like "[0][1]['mask']", where the first index selects args or kwargs.
    name = f"argument {path[3:]}"
    if isinstance(leaf, torch.Tensor):
        check_tensor(name, leaf)
        return TensorSpec.of(leaf)
    if isinstance(leaf, SizeArgument):
        return IntSpec.of_value(leaf.value)
    if isinstance(leaf, NumberArgument):
        return leaf.kind.__name__
    if isinstance(leaf, _SCALARS):
        return f"{type(leaf).__name__} {leaf!r}"
    kind = f"a {type(leaf).__module__}.{type(leaf).__qualname__}"
    next_step = (
        "Pass tensors, numbers, strings, None, or containers that torch.utils._pytree knows."
    )
    if isinstance(leaf, UserDict):  # such as what tokenizers of transformers return
        next_step = "Pass its items as keywords, or dict() of it."
    elif isinstance(leaf, complex):
        next_step = "Pass torch.tensor(z): otherwise each value would need its own program."
    raise UnsupportedObject(
        f"{name} is {kind}",
        next_step,
        argument=name,
        kind=kind,
    )


def map_only(kind: type, function: Callable[[Any], Any], arguments: Any) -> Any:
    """Apply `pytree.tree_map_only`, but keep each ``torch.Size``, which it turns into a tuple."""
    return pytree.tree_map_only(
        kind, function, arguments, is_leaf=lambda item: isinstance(item, torch.Size)
    )


def repetitions(arguments: Any) -> dict[int, int]:
    """Return which leaves repeat an earlier tensor: by the place of each, that of the first."""
    first: dict[int, int] = {}
    leaves = pytree.tree_leaves(arguments, is_leaf=lambda item: isinstance(item, torch.Size))
    places = {
        place: first.setdefault(id(leaf), place)
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
    }
    return {place: before for place, before in places.items() if place != before}


def repeat(arguments: Any, repeated: Mapping[int, int]) -> Any:
    """Return arguments with the repetitions that `repetitions` found in others."""
    if not repeated:
        return arguments
    leaves, structure = pytree.tree_flatten(
        arguments, is_leaf=lambda item: isinstance(item, torch.Size)
    )
    leaves = [leaves[repeated.get(place, place)] for place in range(len(leaves))]
    return pytree.tree_unflatten(leaves, structure)


def without_repetitions(arguments: Any) -> Any:
    """Return arguments in which each repetition is a copy instead."""
    repeated = repetitions(arguments)
    if not repeated:
        return arguments
    leaves, structure = pytree.tree_flatten(
        arguments, is_leaf=lambda item: isinstance(item, torch.Size)
    )
    leaves = [leaf.clone() if place in repeated else leaf for place, leaf in enumerate(leaves)]
    return pytree.tree_unflatten(leaves, structure)
