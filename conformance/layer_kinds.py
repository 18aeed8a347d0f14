"""The kinds of random layers, and the sizes drawn for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from conformance.operations import Draw

#: An input: its contents (``"x"``, ``"index"`` or ``"mask"``), and its sizes.
Shape = tuple[Any, ...]
#: Draws a layer and its inputs.
Kind = Callable[[Draw], tuple[nn.Module, list[Shape]]]

_SIZES = (1, 2, 3, 5, 8, 16, 17, 24, 31, 32, 33, 48, 64)
_LONG = (*_SIZES, 97, 130, 257)
_EXTENTS = (1, 3, 5, 7, 8, 12, 14, 17)


class Call(nn.Module):
    """A function of tensors, followed by weights."""

    def __init__(self, function: Callable[..., Any], *weights: Shape, **keywords: Any) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.zeros(*shape) for shape in weights)
        self.keywords = keywords

    def forward(self, *tensors: Tensor) -> Any:
        """Call it."""
        return self.function(*tensors, *self.weights, **self.keywords)

    def extra_repr(self) -> str:
        """Return what is called."""
        return f"{getattr(self.function, '__name__', self.function)} {self.keywords}"


class Gated(nn.Module):
    """Several products of one input, multiplied together."""

    def __init__(self, width: int, inner: int, count: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, inner, bias) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of all of them, with one as a gate."""
        first, *rest = (layer(x) for layer in self.layers)
        result = F.silu(first)
        for other in rest:
            result = result * other
        return result


class Started(nn.Module):
    """A recurrent layer with an initial state as argument."""

    def __init__(self, layer: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *state: Tensor) -> Any:
        """Run it over a sequence."""
        return self.layer(x, state if isinstance(self.layer, nn.LSTM) else state[0])


def _one(draw: Draw, *of: Any) -> Any:
    return draw(st.sampled_from(of))


def _some(draw: Draw, rank: int, *of: Any) -> tuple[Any, ...]:
    """Draw one value for each axis, most often the same for all."""
    if draw(st.booleans()):
        return (_one(draw, *of),) * rank
    return tuple(_one(draw, *of) for _ in range(rank))


def _image(draw: Draw, channels: int, rank: int) -> Shape:
    extents = (_one(draw, *(_EXTENTS[:5] if rank == 3 else _EXTENTS)) for _ in range(rank))
    return ("x", _one(draw, 1, 1, 2, 3), channels, *extents)


def _convolution(draw: Draw) -> tuple[nn.Module, list[Shape]]:
    rank = _one(draw, 1, 2, 2, 2, 2, 3)
    sizes = _SIZES if rank < 3 else _SIZES[:8]
    groups = _one(draw, 1, 1, 1, 2, 3)
    inputs, outputs = groups * _one(draw, *sizes), groups * _one(draw, *sizes)
    if _one(draw, False, False, True):  # depthwise
        groups, outputs = inputs, inputs * _one(draw, 1, 1, 2)
    kernel = _some(draw, rank, 1, 1, 2, 3, 3, 3, 5, 7)
    stride, dilation = _some(draw, rank, 1, 1, 1, 2, 3), _some(draw, rank, 1, 1, 1, 2)
    padding = tuple(_one(draw, 0, k // 2, k // 2, 1, 2) for k in kernel)
    shape = list(_image(draw, inputs, rank))
    for axis in range(rank):
        least = dilation[axis] * (kernel[axis] - 1) + 1 - 2 * padding[axis]
        shape[3 + axis] = max(shape[3 + axis], least)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    layer: nn.Module = kind(
        *(inputs, outputs, kernel, stride, padding, dilation, groups, draw(st.booleans()))
    )
    if _one(draw, False, False, True):
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[rank - 1](outputs)
        layer = nn.Sequential(layer, norm, _one(draw, nn.ReLU(), nn.SiLU(), nn.Identity()))
    return layer, [tuple(shape)]


def _expanded(draw: Draw) -> tuple[nn.Module, list[Shape]]:
    """Draw a pointwise convolution followed by a depthwise one, as in MobileNet."""
    inputs, inner, size = _one(draw, *_SIZES), _one(draw, *_SIZES), _one(draw, 1, 3, 3, 5)
    first = nn.Conv2d(inputs, inner, 1, bias=draw(st.booleans()))
    second = nn.Conv2d(inner, inner, size, _one(draw, 1, 2), size // 2, groups=inner)
    between = _one(draw, nn.ReLU6(), nn.SiLU(), nn.BatchNorm2d(inner), nn.Identity())
    return nn.Sequential(first, between, second), [_image(draw, inputs, 2)]


def _transposed(draw: Draw) -> tuple[nn.Module, list[Shape]]:
    rank = _one(draw, 1, 2, 2, 3)
    groups = _one(draw, 1, 1, 2)
    inputs, outputs = (groups * _one(draw, *_SIZES[:9]) for _ in range(2))
    kernel, stride = _some(draw, rank, 1, 2, 3, 4, 5), _some(draw, rank, 1, 2, 2, 3)
    dilation = _one(draw, 1, 1, 2)
    more = tuple(_one(draw, 0, min(1, max(s, dilation) - 1)) for s in stride)
    padding = tuple(_one(draw, 0, k // 2) for k in kernel)
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    layer = kind(
        *(inputs, outputs, kernel, stride, padding, more, groups, draw(st.booleans()), dilation)
    )
    shape = list(_image(draw, inputs, rank))
    shape[3:] = [max(extent, 3) for extent in shape[3:]]
    return layer, [tuple(shape)]


def _rows(draw: Draw) -> Shape:
    return _one(draw, (), (1,), (1, 1), (2,), (7,), (33,), (64,), (2, 17), (3, 1, 5), (130,))


def _linear(draw: Draw) -> tuple[nn.Module, list[Shape]]:
    depth, columns = _one(draw, *_LONG), _one(draw, *_LONG)
    return nn.Linear(depth, columns, draw(st.booleans())), [("x", *_rows(draw), depth)]


def _gated(draw: Draw) -> tuple[nn.Module, list[Shape]]:
    depth, columns = _one(draw, *_LONG), _one(draw, *_LONG)
    layer = Gated(depth, columns, _one(draw, 2, 2, 3), draw(st.booleans()))
    return layer, [("x", *_rows(draw), depth)]


def _product(draw: Draw) -> tuple[nn.Module, list[Shape]]:
    lead = _one(draw, (), (1,), (3,), (2, 4))
    rows, depth, columns = (_one(draw, *_LONG[:15]) for _ in range(3))
    left, right = ("x", *lead, rows, depth), (*lead, depth, columns)
    if draw(st.booleans()):
        return Call(torch.matmul, right), [left]
    return Call(torch.matmul), [left, ("x", *right)]


def _attention(draw: Draw) -> tuple[nn.Module, list[Shape]]:
    batch, heads, shared = _one(draw, 1, 2), _one(draw, 1, 3, 4), _one(draw, 1, 1, 2)
    queries, keys = _one(draw, 1, 2, 7, 16, 33, 70), _one(draw, 1, 3, 16, 33, 70, 130)
    size, wide = _one(draw, 8, 16, 17, 32, 64), _one(draw, 16, 24, 64)
    wide = _one(draw, size, size, wide)
    shapes: list[Shape] = [
        ("x", batch, heads * shared, queries, size),
        ("x", batch, heads, keys, size),
        ("x", batch, heads, keys, wide),
    ]
    masked = _one(draw, "no", "no", "causal", "mask", "x")
    if masked in ("mask", "x"):
        lead = _one(draw, (), (1, 1), (batch, 1), (batch, heads * shared))
        shapes.append((masked, *lead, _one(draw, 1, queries, queries), keys))
    keywords = {"is_causal": masked == "causal", "enable_gqa": shared > 1}
    if draw(st.booleans()):
        keywords["scale"] = 0.3
    return Call(F.scaled_dot_product_attention, **keywords), shapes


def _softmax(draw: Draw) -> tuple[nn.Module, list[Shape]]:
    shape = [_one(draw, *_LONG) for _ in range(_one(draw, 1, 2, 2))] + [_one(draw, 1, 5)]
    function = _one(draw, F.softmax, F.log_softmax, torch.cumsum, torch.logsumexp)
    return Call(function, dim=draw(st.integers(-len(shape), len(shape) - 1))), [("x", *shape)]


def _norm(draw: Draw) -> tuple[nn.Module, list[Shape]]:
    if draw(st.booleans()):
        lead = _rows(draw)
        own = [_one(draw, *_LONG), _one(draw, 1, 3, 40)][: _one(draw, 1, 1, 2)]
        norm = _one(draw, nn.LayerNorm, nn.RMSNorm)(own, eps=1e-5)
        return norm, [("x", *lead, *own)]
    groups = _one(draw, 1, 2, 4)
    channels = groups * _one(draw, 1, 3, 8, 17)
    norm = _one(draw, nn.GroupNorm(groups, channels), nn.InstanceNorm2d(channels, affine=True))
    shape = list(_image(draw, channels, 2))
    shape[4] = max(shape[4], 2)  # an instance norm needs more than one element
    return norm, [tuple(shape)]


def _pool(draw: Draw) -> tuple[nn.Module, list[Shape]]:
    rank = _one(draw, 1, 2, 2, 2, 3)
    size, stride = _one(draw, 2, 3), _one(draw, 1, 2, 3)
    padding, ceil = draw(st.integers(0, size // 2)), draw(st.booleans())
    shape = list(_image(draw, _one(draw, *_SIZES), rank))
    shape[3:] = [max(extent, size) for extent in shape[3:]]
    kinds = {
        1: (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d),
        2: (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
        3: (nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d),
    }[rank]
    number = _one(draw, 0, 1, 2)
    pool: Any = kinds[number]
    if number == 2:
        return pool(_one(draw, 1, 2, 3)), [tuple(shape)]
    return pool(size, stride, padding, ceil_mode=ceil), [tuple(shape)]


def _resize(draw: Draw) -> tuple[nn.Module, list[Shape]]:
    shape = _image(draw, _one(draw, *_SIZES[:9]), 2)
    mode = _one(draw, "nearest", "nearest-exact", "bilinear", "bicubic")
    keywords: dict[str, Any] = {"mode": mode}
    if mode.startswith("bi"):
        keywords["align_corners"] = draw(st.booleans())
    if draw(st.booleans()):
        factor = _one(draw, 2.0, 1.5, 2.0 if 1 in shape[3:] else 0.5)
        return Call(F.interpolate, scale_factor=factor, **keywords), [shape]
    return Call(F.interpolate, size=_some(draw, 2, 3, 8, 13), **keywords), [shape]


def _looked_up(index: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(index % weight.shape[0], weight)


def _embedding(draw: Draw) -> tuple[nn.Module, list[Shape]]:
    weight = _one(draw, 1, 5, 33), _one(draw, *_LONG)
    return Call(_looked_up, weight), [("index", *_rows(draw))]


def _recurrent(draw: Draw) -> tuple[nn.Module, list[Shape]]:
    batch, steps = _one(draw, 1, 1, 2, 3, 5, 16, 17), _one(draw, 1, 2, 5)
    inputs, hidden = _one(draw, 1, 3, 16, 33), _one(draw, 1, 3, 8, 16, 17, 32, 48, 70)
    kind = _one(draw, nn.LSTM, nn.GRU)
    count, both, batch_first = _one(draw, 1, 1, 2), draw(st.booleans()), draw(st.booleans())
    layer = kind(*(inputs, hidden, count, draw(st.booleans()), batch_first), bidirectional=both)
    shapes: list[Shape] = [("x", *((batch, steps) if batch_first else (steps, batch)), inputs)]
    if draw(st.booleans()):
        return layer, shapes
    state = ("x", count * (1 + both), batch, hidden)
    return Started(layer), [*shapes, *[state] * (2 if kind is nn.LSTM else 1)]


#: Kinds with more variants are listed more often.
KINDS: tuple[Kind, ...] = (
    *(_convolution, _convolution, _convolution, _convolution, _expanded, _transposed, _linear),
    *(_linear, _gated, _product, _attention, _attention, _softmax, _norm, _pool, _resize),
    *(_embedding, _recurrent, _recurrent),
)
