"""Functions of PyTorch that turn symbolic sizes into numbers, written with operators that do not.

Their C++ code takes sizes as plain integers, so a program that is recorded with them would serve a
single size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch._refs
from torch._decomp import decomposition_table
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tvmify.torch_compat.symbols import SYMBOLS, identities_of, is_symbolic


class KeepingSizes(TorchFunctionMode):
    """Replaces calls of these functions; use around ``torch.export``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of PyTorch, or what does the same for any size."""
        kwargs = kwargs or {}
        spelled = _SPELLED.get(func)
        if spelled is not None and any(map(_is_symbolic, pytree.tree_leaves((args, kwargs)))):
            result = spelled(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _is_symbolic(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return is_symbolic(leaf)
    return isinstance(leaf, SYMBOLS)


def _linspace(
    start: Any,
    end: Any,
    steps: Any,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    **others: Any,
) -> Any:
    dtype = dtype or torch.get_default_dtype()
    is_plain = not any(isinstance(x, torch.Tensor) for x in (start, end)) and not any(
        others.values()
    )
    if not is_plain or dtype not in _EXACT or steps < 2:  # a guard
        return NotImplemented
    index = torch.arange(steps, device=device)
    step = (end - start) / (steps - 1)
    # As PyTorch's kernel, so that both ends are exact.
    rising = start + step * index.to(dtype)
    falling = end - step * (steps - 1 - index).to(dtype)
    return torch.where(index < steps // 2, rising, falling)


def _arange(
    start: Any,
    end: Any = None,
    step: Any = 1,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    **others: Any,
) -> Any:
    """Count the centres of pixels, which begin at a half, as whole numbers and a fraction."""
    dtype = dtype or torch.get_default_dtype()
    known = type(start) is float, isinstance(end, torch.SymInt), step == 1, dtype in _EXACT
    if not all(known) or start.is_integer() or any(others.values()):
        return NotImplemented
    whole = math.floor(start)
    # As PyTorch's kernel, in double precision.
    return (torch.arange(whole, end, device=device).double() + (start - whole)).to(dtype)


def _window(mean: float) -> Callable[..., Any]:
    def window(
        window_length: Any,
        periodic: bool = True,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        **others: Any,
    ) -> Any:
        dtype = dtype or torch.get_default_dtype()
        if dtype not in _EXACT or any(others.values()) or window_length < 2:
            return NotImplemented
        last = window_length if periodic else window_length - 1
        angles = torch.arange(window_length, dtype=dtype, device=device) * (math.pi * 2 / last)
        return angles.cos() * (mean - 1) + mean

    return window


def _largest(
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    rank: int,
) -> Any:
    if return_indices:
        return NotImplemented
    axes = _whole_axes(input, kernel_size, padding, rank)
    if axes and _all(dilation, 1):
        return input.amax(axes, keepdim=True)
    if rank != 1 or input.dim() not in (2, 3):
        return NotImplemented
    kernel, steps, border, holes = (
        [first, *(given if isinstance(given, Sequence) else [given])]
        for first, given in (
            (1, kernel_size),
            (1, stride or kernel_size),
            (0, padding),
            (1, dilation),
        )
    )
    image = input.unsqueeze(-2)
    return torch.max_pool2d(image, kernel, steps, border, holes, ceil_mode).squeeze(-2)


def _mean(
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
    *,
    rank: int,
) -> Any:
    axes = _whole_axes(input, kernel_size, padding, rank)
    is_mean = axes and divisor_override is None and input.is_floating_point()
    return input.mean(axes, keepdim=True) if is_mean else NotImplemented


def _whole_axes(x: torch.Tensor, kernel: Any, padding: Any, rank: int) -> list[int]:
    """Return the axes of a window that covers all of them; none if it may not."""
    kernel = list(kernel) if isinstance(kernel, Sequence) else [kernel]
    kernel = kernel * rank if len(kernel) == 1 else kernel
    is_whole = x.dim() > rank and identities_of(kernel) == identities_of(x.shape[-rank:])
    return list(range(-rank, 0)) if is_whole and _all(padding, 0) else []


def _all(values: Any, number: int) -> bool:
    return all(value == number for value in (values if isinstance(values, Sequence) else [values]))


def _take_along_dim(
    input: torch.Tensor, indices: torch.Tensor, dim: int | None = None, **others: Any
) -> Any:
    if any(value is not None for value in others.values()):
        return NotImplemented
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    if input.dim() != indices.dim() or not -input.dim() <= dim < input.dim():
        return NotImplemented  # eager's error

    def others_than_dim(x: torch.Tensor) -> list[Any]:
        return [*x.shape[: dim % x.dim()], *x.shape[dim % x.dim() + 1 :]]

    common = list(torch.broadcast_shapes(others_than_dim(input), others_than_dim(indices)))

    def broadcast(x: torch.Tensor) -> torch.Tensor:
        at = dim % x.dim()
        return x.expand([*common[:at], x.shape[at], *common[at:]])

    return broadcast(input).gather(dim, broadcast(indices))


def _kron(input: torch.Tensor, other: torch.Tensor, **others: Any) -> Any:
    if any(value is not None for value in others.values()):
        return NotImplemented
    rank = max(input.dim(), other.dim())
    left, right = ([1] * (rank - x.dim()) + list(x.shape) for x in (input, other))
    # Each axis of the one beside that of the other.
    outer = [size for each in left for size in (each, 1)]
    inner = [size for each in right for size in (1, each)]
    product = input.reshape(outer) * other.reshape(inner)
    return product.reshape([a * b for a, b in zip(left, right, strict=True)])


def _one_hot(input: torch.Tensor, num_classes: Any = -1) -> Any:
    if not isinstance(num_classes, torch.SymInt) or input.dtype is not torch.int64:
        return NotImplemented
    zeros = torch.zeros((*input.shape, num_classes), dtype=torch.int64, device=input.device)
    return zeros.scatter(-1, input.unsqueeze(-1), 1)


def _affine_grid(theta: torch.Tensor, size: Any, align_corners: bool | None = None) -> Any:
    operator = torch.ops.aten.affine_grid_generator.default
    with KeepingSizes():  # it calls `linspace`
        return decomposition_table[operator](theta, list(size), bool(align_corners))


def _istft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: Any = None,
    return_complex: bool = False,
) -> Any:
    if not isinstance(length, torch.SymInt):
        return NotImplemented
    options: Any = hop_length, win_length, window, center, normalized, onesided
    return torch._refs.istft(input, n_fft, *options, length, return_complex)  # type: ignore[arg-type]


def _frequencies(is_half: bool) -> Callable[..., Any]:
    def frequencies(
        n: Any,
        d: float = 1.0,
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        **others: Any,
    ) -> Any:
        dtype = dtype or torch.get_default_dtype()
        if dtype not in _EXACT or any(others.values()):
            return NotImplemented
        place = torch.arange(n // 2 + 1 if is_half else n, device=device)
        if not is_half:
            place = torch.where(place < (n + 1) // 2, place, place - n)
        return place.to(dtype) * (1.0 / (n * d))

    return frequencies


def _fill_diagonal(input: torch.Tensor, fill_value: Any, wrap: bool = False) -> Any:
    if wrap or input.dim() != 2 or not input.is_floating_point():
        return NotImplemented
    row, column = (torch.arange(size, device=input.device) for size in input.shape)
    return input.masked_fill_(row[:, None] == column, fill_value)


def _triangle(is_upper: bool) -> Callable[..., Any]:
    def indices(
        row: Any,
        col: Any,
        offset: int = 0,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> Any:
        size, shift = row, offset if is_upper else -offset
        is_part = identities_of([row]) == identities_of([col]) and shift >= 0
        if not is_part or size <= shift:  # a guard
            return NotImplemented
        side = size - shift
        place = torch.arange(side * (side + 1) // 2, device=device)
        if is_upper:  # it is the lower one, read from its end
            place = place.flip(0)
        # The row of the lower triangle that has this place. Roots of squares are exact.
        long = ((8 * place + 1).to(torch.float64).sqrt() - 1).div(2).long()
        across = place - long * (long + 1) // 2
        pair = [side - 1 - long, size - 1 - across] if is_upper else [long + shift, across]
        return torch.stack(pair).to(dtype or torch.int64)

    return indices


#: Types in which PyTorch computes these functions without rounding to others.
_EXACT = (torch.float32, torch.float64)
_OPERATORS: dict[str, Callable[..., Any]] = {
    "linspace": _linspace,
    "arange": _arange,
    "hann_window": _window(0.5),
    "hamming_window": _window(0.54),
    "take_along_dim": _take_along_dim,
    "kron": _kron,
    "one_hot": _one_hot,
    "istft": _istft,
    "fft_fftfreq": _frequencies(is_half=False),
    "fft_rfftfreq": _frequencies(is_half=True),
    "fill_diagonal_": _fill_diagonal,
    "tril_indices": _triangle(is_upper=False),
    "triu_indices": _triangle(is_upper=True),
    "affine_grid": _affine_grid,
    "affine_grid_generator": _affine_grid,
    **{f"max_pool{rank}d": partial(_largest, rank=rank) for rank in (1, 2, 3)},
    **{f"avg_pool{rank}d": partial(_mean, rank=rank) for rank in (1, 2, 3)},
}


def _names(name: str) -> list[Any]:
    """Return what a mode sees if code calls an operator: a function, a method, an overload."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet else []
    native = torch._C._nn, torch._C._fft  # type: ignore[attr-defined]  # no stub has them
    places = (torch, torch.Tensor, *native, torch.nn.functional)
    functions = [getattr(place, name) for place in places if hasattr(place, name)]
    return [packet, *overloads, *functions]


_SPELLED = {each: spelled for name, spelled in _OPERATORS.items() for each in _names(name)}
