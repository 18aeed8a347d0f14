"""Single operators against eager PyTorch: operators that lack a schedule rule show here first.

    python -m benchmarks.operators [--only "conv* cumsum"] [--dynamic] [--threads 2] [--rounds 50]

Each operator is compiled as its own module, with ``--dynamic`` as a program for many shapes. Then
compiled code and eager take turns in one process. Errors are the largest error over the largest
output, against eager PyTorch in float64. Times are the shortest of many bursts, since other load on
the machine can only add to them.
"""

from __future__ import annotations

import argparse
import functools
import timeit
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from benchmarks.models import chosen
from benchmarks.worker import largest_error

MICROSECONDS = 1e6
BURST = 0.002  # seconds
#: Operators that take longer than this many times eager are marked.
BEHIND = 1.2

Case = tuple[nn.Module, tuple[Tensor, ...]]


class Operator(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        """Call the function."""
        return self.function(*args)


def _image(channels: int, *sizes: int) -> tuple[Tensor]:
    return (torch.randn(1, channels, *sizes),)


def _rotary_halves(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def _rotary_pairs(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * angles.cos() + turned * angles.sin()


def _rotary_complex(x: Tensor, rotation: Tensor) -> Tensor:
    pairs, factors = (torch.view_as_complex(y.unflatten(-1, (-1, 2))) for y in (x, rotation))
    return torch.view_as_real(pairs * factors).flatten(-2)


def _inverse_fourier(parts: Tensor, window: Tensor) -> Tensor:
    return torch.istft(torch.complex(parts[:, 0], parts[:, 1]), 1024, 256, window=window)


def _windows(x: Tensor) -> Tensor:
    n, height, width, channels = x.shape
    x = x.view(n, height // 7, 7, width // 7, 7, channels)
    return x.transpose(2, 3).reshape(-1, 7, 7, channels)


@functools.cache
def _feed_forward() -> nn.Module:
    """Return layers whose weights, 57 MB, come from memory; the same for all cases."""
    with torch.random.fork_rng(devices=[]):  # others draw the same numbers, whoever is first
        layers = [nn.Linear(*sizes) for _ in range(12) for sizes in ((384, 1536), (1536, 384))]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


def _operators() -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    rows = torch.randn(128, 768)
    volume, image, line = _image(32, 8, 28, 28), _image(64, 56, 56), _image(64, 1000)
    table, places = torch.randn(10_000, 64), torch.randint(10_000, (256,))
    some = torch.randint(128, (128, 768))
    steps, batch = torch.randn(32, 1, 128), torch.randn(32, 8, 128)
    layers, sizes = _feed_forward(), (2, 4, 6, 9, 16)
    return {
        "conv1d": (nn.Conv1d(64, 128, 3, padding=1), line),
        "conv1d_few": (nn.Conv1d(1, 64, 10, stride=5), _image(1, 16000)),
        "conv2d": (nn.Conv2d(64, 64, 3, padding=1), image),
        "conv2d_dilated": (nn.Conv2d(64, 64, 3, padding=2, dilation=2), image),
        "conv2d_1_per_group": (nn.Conv2d(64, 64, 3, padding=1, groups=64), image),
        "conv2d_2_per_group": (nn.Conv2d(64, 64, 3, padding=1, groups=32), image),
        "conv2d_4_per_group": (nn.Conv2d(128, 128, 3, padding=1, groups=32), _image(128, 56, 56)),
        "conv2d_8_per_group": (nn.Conv2d(256, 256, 3, padding=1, groups=32), _image(256, 28, 28)),
        "conv2d_multiplied": (nn.Conv2d(64, 128, 3, padding=1, groups=64), image),
        "conv1d_grouped": (nn.Conv1d(256, 256, 128, padding=64, groups=16), _image(256, 200)),
        "conv2d_to_3": (nn.Conv2d(64, 3, 3, padding=1), image),
        "conv2d_to_1": (nn.Conv2d(32, 1, 9, padding=4), _image(32, 56, 56)),
        "conv1d_to_1": (nn.Conv1d(64, 1, 7, padding=3), line),
        "conv1d_halved": (nn.Conv1d(512, 512, 3, stride=2), _image(512, 800)),
        "conv1d_pooled": (
            nn.Sequential(nn.Conv1d(64, 64, 5), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(64, 64, 5)),
            line,
        ),
        "conv3d_depthwise": (nn.Conv3d(32, 32, 3, padding=1, groups=32), volume),
        "conv3d": (nn.Conv3d(32, 64, 3, padding=1), volume),
        "conv3d_few": (nn.Conv3d(3, 32, 3, stride=2, padding=1), _image(3, 16, 56, 56)),
        "conv3d_pointwise": (nn.Conv3d(32, 64, 1), volume),
        "conv_transpose1d": (nn.ConvTranspose1d(64, 32, 4, stride=2, padding=1), line),
        "conv_transpose2d": (nn.ConvTranspose2d(64, 32, 2, stride=2), image),
        "conv_transpose2d_3": (nn.ConvTranspose2d(64, 32, 3, 2, 1, output_padding=1), image),
        "conv_transpose2d_grouped": (nn.ConvTranspose2d(64, 64, 4, 2, 1, groups=64), image),
        "conv_transpose3d": (nn.ConvTranspose3d(32, 16, 2, stride=2), volume),
        "embedding": (nn.Embedding(10_000, 64), (places,)),
        "embedding_bag": (nn.EmbeddingBag(10_000, 64), (places.view(32, 8),)),
        "embedding_bag_offsets": (
            nn.EmbeddingBag(10_000, 64, mode="sum"),
            (places, torch.arange(0, 256, 8)),
        ),
        "gather": (lambda x, i: x.gather(0, i), (rows, some)),
        "index_select": (lambda x, i: x.index_select(0, i), (table, places)),
        "index_put": (
            lambda x, i, y: x.index_put((i,), y),
            (table, torch.randperm(10_000)[:256], torch.randn(256, 64)),
        ),
        "scatter": (lambda x, i, y: x.scatter(0, i, y), (rows, some, torch.randn(128, 768))),
        "scatter_add": (lambda x, i, y: x.scatter_add(0, i, y), (rows, some, torch.ones(128, 768))),
        "gather_rows": (
            lambda x, i: x.gather(0, i[:, None].expand(-1, 64)),
            (table, places),
        ),
        "scatter_add_rows": (
            lambda x, i: x.new_zeros(128, 768).scatter_add(0, i[:, None].expand(-1, 768), x),
            (rows, some[:, 0].contiguous()),
        ),
        "scatter_amax_rows": (
            lambda x, i: x.new_zeros(128, 768).scatter_reduce(
                0, i[:, None].expand(-1, 768), x, "amax"
            ),
            (rows, some[:, 0].contiguous()),
        ),
        "messages_added": (
            lambda x, edges, weight: torch.zeros_like(x).index_add(
                0, edges[1], x[edges[0]] * weight[:, None]
            ),
            (table[:2000].clone(), torch.randint(2000, (2, 20_000)), torch.rand(20_000)),
        ),
        "neighbours": (
            lambda x, i: x[:, None].expand(-1, 128, -1).gather(1, i[..., None].expand(-1, -1, 64)),
            (table[:128].clone(), torch.randint(128, (128, 16))),
        ),
        "cumsum_last": (lambda x: x.cumsum(-1), (rows,)),
        "cumsum_first": (lambda x: x.cumsum(0), (rows,)),
        "argmax_last": (lambda x: x.argmax(-1), (rows,)),
        "argmax_first": (lambda x: x.argmax(0), (rows,)),
        "topmost": (lambda x: tuple(x.max(-1)), (rows,)),
        "max_pool1d": (nn.MaxPool1d(3, 2), line),
        "max_pool2d": (nn.MaxPool2d(3, 2, 1), _image(64, 112, 112)),
        "max_pool3d": (nn.MaxPool3d(2), volume),
        "avg_pool1d": (nn.AvgPool1d(3, 2), line),
        "avg_pool2d": (nn.AvgPool2d(2), image),
        "avg_pool3d": (nn.AvgPool3d(2), volume),
        "adaptive_avg_pool1d": (nn.AdaptiveAvgPool1d(7), line),
        "adaptive_avg_pool2d": (nn.AdaptiveAvgPool2d(7), image),
        "adaptive_avg_pool2d_1": (nn.AdaptiveAvgPool2d(1), image),
        "adaptive_avg_pool3d": (nn.AdaptiveAvgPool3d(2), volume),
        "adaptive_max_pool2d": (nn.AdaptiveMaxPool2d(7), image),
        "resize_nearest": (nn.Upsample(scale_factor=2), image),
        "resize_bilinear": (nn.Upsample(scale_factor=2, mode="bilinear"), image),
        "resize_bicubic": (nn.Upsample(scale_factor=2, mode="bicubic"), image),
        "resize_3_channels": (nn.Upsample(size=(224, 224), mode="bilinear"), _image(3, 256, 256)),
        "resize_linear": (nn.Upsample(scale_factor=2, mode="linear"), line),
        "resize_trilinear": (nn.Upsample(scale_factor=2, mode="trilinear"), volume),
        "pad_constant": (nn.ZeroPad2d(3), image),
        "pad_reflect": (nn.ReflectionPad2d(3), image),
        "pad_replicate": (nn.ReplicationPad2d(3), image),
        "cat_first": (lambda x, y: torch.cat([x, y]), (rows, rows + 1)),
        "cat_last": (lambda x, y: torch.cat([x, y], -1), (rows, rows[:, :100].clone())),
        "cat_channels": (lambda x, y: torch.cat([x, y], 1), (*image, image[0] + 1)),
        "stack_last": (lambda x, y: torch.stack([x, y], -1), (rows, rows + 1)),
        "split": (lambda x: [part + 1 for part in x.split(256, -1)], (rows,)),
        "transpose": (lambda x: x.t().contiguous(), (torch.randn(1024, 1024),)),
        "permute_heads": (lambda x: x.transpose(1, 2).contiguous(), (torch.randn(1, 128, 12, 64),)),
        "permute_heads_8": (
            lambda x: x.transpose(1, 2).contiguous(),
            (torch.randn(8, 128, 12, 64),),
        ),
        "shuffle_channels": (nn.ChannelShuffle(2), _image(116, 28, 28)),
        "channels_first": (
            lambda x: x.permute(0, 3, 1, 2).contiguous(),
            (torch.randn(1, 56, 56, 64),),
        ),
        "channels_last": (lambda x: x.permute(0, 2, 3, 1).contiguous(), image),
        "layer_norm": (nn.LayerNorm(768), (rows,)),
        "group_norm": (nn.GroupNorm(8, 64), image),
        "instance_norm": (nn.InstanceNorm2d(64), image),
        "rms_norm": (nn.RMSNorm(768), (rows,)),
        "batch_norm": (nn.BatchNorm2d(64), image),
        "prelu": (nn.PReLU(64), image),
        "softmax_last": (lambda x: x.softmax(-1), (rows,)),
        "softmax_first": (lambda x: x.softmax(0), (rows,)),
        "log_softmax_last": (lambda x: x.log_softmax(-1), (rows,)),
        "log_softmax_channels": (lambda x: x.log_softmax(1), image),
        "var_channels": (lambda x: x.var(1), image),
        "mean_image": (lambda x: x.mean((2, 3)), image),
        "windows": (_windows, (torch.randn(1, 56, 56, 96),)),
        "cat_width": (lambda x, y: torch.cat([x, y], -1), (*image, image[0] + 1)),
        "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2) + 1, image),
        "repeat_interleave": (lambda x: x.repeat_interleave(2, -1), (rows,)),
        "rotary_halves": (_rotary_halves, (torch.randn(1, 12, 128, 64), torch.randn(128, 64))),
        "rotary_pairs": (_rotary_pairs, (torch.randn(1, 12, 128, 64), torch.randn(128, 64))),
        "rotary_complex": (_rotary_complex, (torch.randn(1, 12, 128, 64), torch.randn(128, 64))),
        "inverse_fourier": (_inverse_fourier, (torch.randn(1, 2, 513, 100), torch.ones(1024))),
        "distances": (lambda x: (x[:, None] - x).square().sum(-1), (torch.randn(128, 64),)),
        "four_bits": (lambda x: torch.stack([x & 15, x >> 4], -1), (rows.to(torch.uint8),)),
        "softmax_causal": (
            lambda x, mask: x.masked_fill(mask, -1e9).softmax(-1),
            (torch.randn(12, 128, 128), torch.ones(128, 128).triu(1).bool()),
        ),
        "sigmoid_of_none": (lambda x: (x - 1e9).sigmoid(), (rows,)),
        "mean_last": (lambda x: x.mean(-1), (rows,)),
        "mean_first": (lambda x: x.mean(0), (rows,)),
        "mean_middle": (lambda x: x.mean(1), (torch.randn(16, 128, 256),)),
        "mean_pixels": (lambda x: x.mean((1, 2)), (torch.randn(8, 28, 28, 64),)),
        "sum_middle": (lambda x: x.sum(1), (torch.randn(16, 128, 256),)),
        "sum_all": (lambda x: x.sum(), (torch.randn(1024, 1024),)),
        "mean_all": (lambda x: x.mean(), (rows,)),
        "max_all": (lambda x: x.amax(), (torch.randn(1024, 1024),)),
        "norm_all": (lambda x: x.norm(), (torch.randn(1024, 1024),)),
        "var_last": (lambda x: x.var(-1), (rows,)),
        "roll": (lambda x: x.roll((3, 3), (2, 3)), image),
        "roll_channels_last": (lambda x: x.roll((-3, -3), (1, 2)), (torch.randn(1, 56, 56, 96),)),
        "flip": (lambda x: x.flip(-1), (rows,)),
        "tril": (lambda x: x.tril(), (torch.randn(512, 512),)),
        "where": (lambda x, y: torch.where(x > 0, x, y), (rows, rows.flip(0).contiguous())),
        "one_hot": (lambda i: F.one_hot(i, 1000), (torch.randint(1000, (128,)),)),
        "gelu": (nn.GELU(), (rows,)),
        "scale_image": (lambda x: x * 0.5, image),
        "remainder": (lambda x: x % 0.7, (rows,)),
        "floor_divide": (lambda x: x // 0.7, (rows,)),
        "round": (lambda x: x.round(), (rows,)),
        "tanh_float64": (lambda x: x.tanh(), (rows.double(),)),
        "softmax_float64": (lambda x: x.softmax(-1), (rows.double(),)),
        "linear": (nn.Linear(768, 768), (rows,)),
        "bmm": (lambda x: x @ x.transpose(1, 2), (torch.randn(12, 128, 64),)),
        "scores_1": (lambda x, y: x @ y.T, (torch.randn(1, 384), torch.randn(10000, 384))),
        "scores_8": (lambda x, y: x @ y.T, (torch.randn(8, 384), torch.randn(10000, 384))),
        "scores_64": (lambda x, y: x @ y.T, (torch.randn(64, 384), torch.randn(10000, 384))),
        "linear_argument": (F.linear, (torch.randn(2, 4, 768), torch.randn(3072, 768))),
        "product_1": (torch.matmul, (torch.randn(1, 768), torch.randn(768, 3072))),
        "product_8": (torch.matmul, (torch.randn(8, 768), torch.randn(768, 3072))),
        "product_32": (torch.matmul, (torch.randn(32, 768), torch.randn(768, 3072))),
        "weighted_values": (
            torch.matmul,
            (torch.randn(1, 12, 1, 1000), torch.randn(1, 12, 1000, 64)),
        ),
        "matrix_vector": (lambda x, y: x @ y, (torch.randn(1024, 1024), torch.randn(1024))),
        **{f"feed_forward_{n}": (layers, (torch.randn(n, 384),)) for n in sizes},
        "lstm": (nn.LSTM(128, 256), (steps,)),
        "lstm_batch": (nn.LSTM(128, 256), (batch,)),
        "gru": (nn.GRU(128, 256), (steps,)),
        "gru_batch": (nn.GRU(128, 256), (batch,)),
    }


def build(name: str) -> Case:
    """Return an operator as a module, and its arguments."""
    torch.manual_seed(0)
    function, args = _operators()[name]
    return (function if isinstance(function, nn.Module) else Operator(function)).eval(), args


#: Names of all operators.
OPERATORS = tuple(_operators())


@dataclass
class Contest:
    """An operator, ready to be run compiled and in eager."""

    name: str
    compiled: Callable[[], Any]
    eager: Callable[[], Any]
    error: float

    @classmethod
    def of(cls, name: str, dynamic: bool | None = None) -> Contest:
        """Compile an operator.

        Parameters
        ----------
        name
            One of `OPERATORS`.
        dynamic
            See `tvmify.tvmify`.

        Raises
        ------
        NotCompiled
            The operator is refused.
        """
        from tvmify import tvmify

        module, args = build(name)
        fast = tvmify(deepcopy(module), dynamic=dynamic, strict=True, progress=False)
        with torch.no_grad():
            wide = pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, args)
            references = pytree.tree_leaves(deepcopy(module).double()(*wide))
            error = largest_error(fast(*args), references)
        return cls(name, lambda: fast(*args), lambda: module(*args), error)

    def measure(self, rounds: int) -> tuple[float, float]:
        """Return the microseconds of a call, compiled and in eager, from the fastest bursts."""
        calls, times = [self.compiled, self.eager], ([], [])
        counts = [max(int(BURST / timeit.timeit(call, number=3) * 3), 1) for call in calls]
        for _ in range(rounds):
            for call, count, taken in zip(calls, counts, times, strict=True):
                call()
                taken.append(timeit.timeit(call, number=count) / count * MICROSECONDS)
        return min(times[0]), min(times[1])


def show(contests: list[Contest], rounds: int, console: Console) -> None:
    """Measure, and print the table with slow operators marked."""
    table = Table("operator", "tvmify µs", "eager µs", "ratio", "error", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for contest in contests:
        compiled, eager = contest.measure(rounds)
        ratio = compiled / eager
        mark = "[red]" if ratio > BEHIND else ""
        table.add_row(
            contest.name,
            f"{compiled:.1f}",
            f"{eager:.1f}",
            f"{mark}{ratio:.2f}",
            f"{contest.error:.0e}",
        )
    console.print(table)


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description="Time single operators against eager PyTorch.")
    parser.add_argument("--only", default="*", help="names or patterns, such as 'conv* cumsum'")
    parser.add_argument("--dynamic", action="store_true", help="programs for many shapes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with torch.no_grad():
        dynamic = True if given.dynamic else None
        contests = [Contest.of(name, dynamic) for name in chosen(given.only, OPERATORS)]
        show(contests, given.rounds, Console())


if __name__ == "__main__":
    main()
