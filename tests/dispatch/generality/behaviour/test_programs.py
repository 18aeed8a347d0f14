"""Programs for any size: their results, and the sizes that share a symbol."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.dispatch.generality.nets import Encoder, Linear, Slices, check, compiled, drawn


class Cached(Linear):
    """Attention of one query, with a growing number of keys."""

    def forward(self, x: torch.Tensor, keys: torch.Tensor) -> Any:  # type: ignore[override]
        keys = torch.cat([keys, self.linear(x)], 1)
        found = nn.functional.scaled_dot_product_attention(x, keys, keys)
        return torch.relu(found * 2 + x), keys


class Moved(nn.Module):
    """Operators that move and count elements."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        padded = nn.functional.pad(x, (1, -1, 0, 2), value=3.0)
        running = (x.cumsum(0), torch.relu(x.cumsum(0) * 2), x.cumsum(1), x.t().cumprod(0))
        larger = nn.functional.interpolate(x[None, None], scale_factor=1.5, mode="bilinear")
        return padded, *running, x.flip(1)[:, ::2] * 2, y * x.shape[0], y + 1, larger


class Found(nn.Module):
    """Elements at computed positions along an axis of varying size."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> Any:
        ends = x.argmax(0, keepdim=True)
        return x[at] * 2, x.gather(0, ends), x[torch.arange(x.size(0)), x.argmax(-1)]


class Gathered(nn.Module):
    """Parts of rows and whole ones, found by an index that is expanded."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> Any:
        rows = at[:, None]
        return x.gather(0, rows.expand(-1, 4)), x.gather(0, rows.expand(-1, x.size(1)))


class Written(nn.Module):
    """Elements written or added at computed positions."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> Any:
        zeros, rows = x.new_zeros(4, 5), at[:, None].expand(-1, 5)
        largest = (x.size(0) - 1 - at)[:, None]
        return (
            zeros.scatter_add(0, rows, x),
            zeros.index_add(0, at, x),
            x.index_put((largest, at[None, :2]), x[:, :1], accumulate=True),
            x.scatter(1, at[:, None], x[:, 1:]),
        )


class Resized(nn.Module):
    """Sequences resized to other lengths."""

    def forward(self, x: torch.Tensor) -> Any:
        resize, pooled = nn.functional.interpolate, nn.functional.adaptive_avg_pool1d(x, 3)
        longer = resize(x, scale_factor=2.5, mode="linear"), resize(x, scale_factor=1.5)
        return pooled, *longer, resize(x, size=13, mode="linear", align_corners=True)


class Windows(nn.Module):
    """Attention within windows, with the number of windows where the number of heads usually is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, size = x.shape
        padded = nn.functional.pad(x, (0, 0, 0, (4 - length % 4) % 4))
        windows = padded.view(batch, -1, 4, size)
        found = nn.functional.scaled_dot_product_attention(windows, windows, windows)
        return found.reshape(batch, -1, size)[:, :length]


class Views(nn.Module):
    """Results that are views of an argument, or of one another."""

    def forward(self, x: torch.Tensor) -> Any:
        y = x * 2
        return x.t(), x[1:], y, y[:, 1:], y.flatten(), y.t()


class Parts(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return (x * 2).chunk(2, -1)


class LeftToTorch(nn.Module):
    """Bridged operators, with sizes as arguments, and with complex results."""

    def forward(self, x: torch.Tensor) -> Any:
        spectrum = torch.fft.rfft(2 * x, dim=0)
        values, order = (x + 1).sort(0)
        larger, _ = (x * 2).topk(x.size(0) // 2 + 1, 0)
        return (spectrum * spectrum.conj()).real, values * 2, order + 1, larger.relu()


LAYERS: dict[str, tuple[nn.Module, Any]] = {
    "cache": (Cached(), lambda n: (drawn(1, 1, 8), drawn(1, n, 8))),
    "slices": (Slices(), lambda n: (drawn(2, n, 8),)),
    "moved": (Moved(), lambda n: (drawn(n, 5), torch.ones(0, n))),
    "found": (Found(), lambda n: (drawn(n, 5), torch.tensor([n - 1, 0, -n]))),
    "gathered": (Gathered(), lambda n: (drawn(n, 5), torch.tensor([n - 1, 0]))),
    "views": (Views(), lambda n: (drawn(n, 8),)),
    "parts": (Parts(), lambda n: (drawn(n, 8),)),
    "left to torch": (LeftToTorch(), lambda n: (drawn(n, 6),)),
    "lstm": (nn.LSTM(8, 8, batch_first=True), lambda n: (drawn(2, n, 8),)),
    "both directions": (nn.LSTM(8, 8, bidirectional=True), lambda n: (drawn(n, 2, 8),)),
    "resized": (Resized(), lambda n: (drawn(2, 3, n),)),
    "written": (Written(), lambda n: (drawn(n, 5), torch.arange(n) % 4)),
    "images": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        lambda n: (drawn(n, 3, 6, 6),),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_dynamic_program_matches_eager(name: str) -> None:
    torch.manual_seed(0)
    module, arguments = LAYERS[name]
    for part in module.modules():  # drawn at import, after draws of other files
        if isinstance(part, nn.Linear | nn.Conv2d | nn.LSTM):
            part.reset_parameters()
    fast = compiled(module)
    for size in (5, 7, 3, 8, 9, 15, 16):
        check(fast, module, *arguments(size))
    assert fast.cache_info().builds == 2
    assert fast.cache_info().eager == 0


def test_one_program_attends_within_any_number_of_windows() -> None:
    module = Windows()
    fast = compiled(module)
    for length in (5, 9, 7, 13, 18):
        check(fast, module, drawn(2, length, 8))
    assert fast.cache_info().builds == 2


@pytest.mark.parametrize("position", [7, -8])
def test_a_position_outside_of_an_axis_of_varying_size_is_an_error(position: int) -> None:
    fast = compiled(Found())
    for rows in (5, 8, 7):
        fast(drawn(rows, 5), torch.tensor([0]))
    with pytest.raises(IndexError):
        fast(drawn(7, 5), torch.tensor([0, position]))


def test_dynamic_views_alias_as_in_eager() -> None:
    fast, module = compiled(Views()), Views()
    for rows in (3, 5, 7):
        x = drawn(rows, 8)
        for run in (fast, module):
            results = run(x)
            memory = [result.untyped_storage().data_ptr() for result in results]
            assert memory[:2] == [x.untyped_storage().data_ptr()] * 2
            assert len(set(memory[2:])) == 1
        assert [r.stride() for r in fast(x)] == [r.stride() for r in module(x)]
    assert fast.cache_info().builds == 2


def test_a_size_that_becomes_a_number_in_translation_is_a_guard() -> None:
    """PyTorch records the fast path of this layer without checking the number of features."""
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    fast = compiled(module, dynamic=True)
    for batch, length in ((5, 9), (7, 8), (3, 20)):
        check(fast, module, drawn(batch, length, 8))
    assert fast.cache_info().builds == 1
    assert "s2 == 8" in str(fast.explain())


class Masked(Encoder):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return self.layer(x, src_key_padding_mask=mask), y.t(), y[1:] * 2


@pytest.mark.thorough
def test_sizes_that_become_equal_in_translation_are_one() -> None:
    """PyTorch records the fast path without checking whether the mask fits.

    A view of the last argument is returned, and its symbols get other names.
    """
    torch.manual_seed(0)
    module = Masked()
    fast = compiled(module, dynamic=True)
    for batch, length, rows in ((5, 20, 3), (7, 16, 9), (4, 30, 4)):
        mask = torch.arange(length).expand(batch, -1) >= length - 2
        check(fast, module, drawn(batch, length, 16), mask, drawn(rows, 5))
    assert fast.cache_info().entries == 1
    assert "(float32[s0, s1, 16] cpu, bool[s0, s1] cpu, float32[s2, s3] cpu)" in str(fast.explain())


class Attends(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


def test_attention_of_any_number_of_features() -> None:
    fast = compiled(Attends(), dynamic=True)
    for shape in ((2, 7, 4), (3, 5, 3), (2, 2, 9)):
        check(fast, Attends(), drawn(*shape))
    assert fast.cache_info().builds == 1


class Rounds(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        length = x.size(0)
        parts = math.floor(length * 0.75 - 0.5), math.ceil(length / 3 - 0.25)
        return [x.new_zeros(part) for part in parts], x * 2


def test_rounded_lines_of_a_size_are_exact() -> None:
    fast = compiled(Rounds(), dynamic=True)
    for length in range(9, 30):
        check(fast, Rounds(), drawn(length))
    assert fast.cache_info().builds == 1


def test_channels_of_volumes_are_not_symbols_at_first() -> None:
    module = nn.MaxPool3d(2)
    fast = compiled(module, dynamic=True)
    for sides in ((9, 8, 6), (7, 9, 8)):
        check(fast, module, drawn(2, 3, *sides))
    assert fast.cache_info().builds == 1


@pytest.mark.parametrize("axes", [(0, 2), (0, 1, 2)])
@pytest.mark.parametrize("pool", [nn.MaxPool1d(3, 2), nn.AvgPool1d(3, 2)], ids=str)
def test_pools_of_sequences_of_any_length(pool: nn.Module, axes: tuple[int, ...]) -> None:
    fast = compiled(pool, dynamic_shapes=(dict.fromkeys(axes, Dim.AUTO),))
    for batch, length in ((3, 17), (5, 8), (2, 20)):
        check(fast, pool, drawn(batch, 4 if len(axes) < 3 else batch, length))
    assert fast.cache_info().builds == 1
