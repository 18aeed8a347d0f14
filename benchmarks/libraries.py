"""Layers with their epilogues, against MKL and oneDNN with weights packed beforehand.

    THP_MEM_ALLOC_ENABLE=1 python -m benchmarks.libraries [--only "bert* vit*"] [--threads 2]

A linear layer is computed alone, then with its epilogue: an activation, or a residual. tvmify
compiles both to one kernel; the libraries compute the product and then call an operator of PyTorch,
or oneDNN fuses it. Convolutions of channels-last images are all fused with a ReLU. The sides take
turns, and every call uses other weights, as in a network. The environment variable puts the
libraries' weights on huge pages, as ours are.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import chosen
from tvmify.capture import resolve
from tvmify.decorate.decorated import saved_method
from tvmify.decorate.decorator import tvmify
from tvmify.runtime.measuring import copies

MICROSECONDS = 1e6
#: Bytes of the copies of a weight that calls cycle through, their largest number, calls per turn.
COLD, MOST_COPIES, TURN = 200 << 20, 64, 4
#: The largest difference between the sides: errors of float32 sums of thousands of products.
CLOSE = 1e-4
AFTER: dict[str, Callable[..., Tensor]] = {
    "": lambda y, _: y,
    "add": torch.add,
    "gelu": lambda y, _: F.gelu(y),
    "relu": lambda y, _: torch.relu(y),
}
mkl, mkldnn = torch.ops.mkl, torch.ops.mkldnn

Call = Callable[[], Tensor]


class Linear(NamedTuple):
    """A product of rows with weights, and its epilogue: a name in `AFTER`."""

    rows: int
    depth: int
    columns: int
    then: str

    def sides(self) -> list[list[list[Call]]]:
        """Return tvmify, MKL and oneDNN, alone, then with the epilogue, then oneDNN fused.

        Each is a list of calls that differ only in the copy of the weights that they read.
        """
        x, other = torch.randn(self.rows, self.depth), torch.randn(self.rows, self.columns)
        layer = nn.Linear(self.depth, self.columns)
        bias, weights = layer.bias.detach(), _clones(layer.weight)
        by_mkl = [(mkl._mkl_reorder_linear_weight(w, self.rows), w) for w in weights]
        by_dnn = [mkldnn._reorder_linear_weight(w, self.rows) for w in weights]
        linear = mkldnn._linear_pointwise

        def with_(after: Callable[..., Tensor]) -> list[list[Call]]:
            return [
                _compiled(_Module(layer, after), x, other),
                [lambda w=w: after(mkl._mkl_linear(x, *w, bias, self.rows), other) for w in by_mkl],
                [lambda w=w: after(linear(x, w, bias, "none", [], ""), other) for w in by_dnn],
            ]

        if self.then == "add":
            fused = [partial(linear.binary, x, other, w, bias, "add") for w in by_dnn]
        else:
            fused = [partial(linear, x, w, bias, self.then, [], "none") for w in by_dnn]
        return [with_(AFTER[""]), [*with_(AFTER[self.then]), fused]]


class Convolution(NamedTuple):
    """A convolution of a square image, with a ReLU."""

    size: int
    inputs: int
    outputs: int
    window: int
    stride: int

    def sides(self) -> list[list[list[Call]]]:
        """Return tvmify and oneDNN."""
        x = torch.randn(1, self.size, self.size, self.inputs)
        layer = nn.Conv2d(self.inputs, self.outputs, self.window, self.stride, self.window // 2)
        bias, how = layer.bias, [layer.padding, layer.stride, layer.dilation, 1]
        image = x.permute(0, 3, 1, 2)
        packed = [
            mkldnn._reorder_convolution_weight(w, *how, image.shape) for w in _clones(layer.weight)
        ]
        convolve = mkldnn._convolution_pointwise

        def convolution(w: Tensor) -> Tensor:
            return convolve(image, w, bias, *how, "relu", [], "").permute(0, 2, 3, 1)

        return [[_compiled(_ChannelsLast(layer), x), [partial(convolution, w) for w in packed]]]


LAYERS: dict[str, Linear | Convolution] = {
    "bert_output": Linear(128, 768, 768, "add"),
    "bert_up": Linear(128, 768, 3072, "gelu"),
    "bert_down": Linear(128, 3072, 768, "add"),
    "vit_up": Linear(197, 768, 3072, "gelu"),
    "vit_down": Linear(197, 3072, 768, "add"),
    "whisper_up": Linear(1500, 384, 1536, "gelu"),
    "whisper_down": Linear(1500, 1536, 384, "add"),
    "gpt2_up": Linear(64, 768, 3072, "gelu"),
    "minilm_up": Linear(128, 384, 1536, "gelu"),
    "mlp_64": Linear(64, 512, 512, "relu"),
    "resnet_stem": Convolution(224, 3, 64, 7, 2),
    "resnet_56": Convolution(56, 64, 64, 3, 1),
    "resnet_56_up": Convolution(56, 64, 256, 1, 1),
    "resnet_56_halved": Convolution(56, 128, 128, 3, 2),
    "resnet_56_halved_18": Convolution(56, 64, 128, 3, 2),
    "resnet_28": Convolution(28, 128, 128, 3, 1),
    "resnet_28_down": Convolution(28, 512, 128, 1, 1),
    "resnet_28_halved": Convolution(28, 256, 256, 3, 2),
    "resnet_14": Convolution(14, 256, 256, 3, 1),
    "resnet_14_up": Convolution(14, 256, 1024, 1, 1),
    "resnet_14_halved": Convolution(14, 512, 512, 3, 2),
    "resnet_7": Convolution(7, 512, 512, 3, 1),
    "resnet_7_down": Convolution(7, 2048, 512, 1, 1),
}


class _Module(nn.Module):
    def __init__(self, layer: nn.Module, after: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.after = layer, after

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.after(self.layer(x), other)


class _ChannelsLast(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)


def _clones(weight: Tensor) -> list[Tensor]:
    weight = weight.detach()
    return [weight.clone() for _ in range(min(MOST_COPIES, COLD // weight.nbytes))]


def _compiled(module: nn.Module, *args: Tensor) -> list[Call]:
    fast: Any = tvmify(module.eval(), progress=False)
    artifact = saved_method(fast).compiled(args, {})
    weights = [resolve(module, name).detach() for name in artifact.weights]
    return [partial(call, args) for call in copies(artifact, weights, COLD)[0]]


def measure(sides: list[list[Call]], rounds: int) -> list[float]:
    """Let the sides take turns; return the median microseconds of each side's calls."""
    turns, taken = [cycle(calls) for calls in sides], [[] for _ in sides]
    for _ in range(rounds):
        for calls, times in zip(turns, taken, strict=True):
            next(calls)()
            for call in islice(calls, TURN):
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * MICROSECONDS)
    return [statistics.median(times) for times in taken]


def _row(layer: Linear | Convolution, rounds: int) -> list[str]:
    groups = layer.sides()
    for first, *others in groups:
        for other in others:
            torch.testing.assert_close(other[0](), first[0](), rtol=CLOSE, atol=CLOSE)
    times = measure([side for group in groups for side in group], rounds)
    return [f"{taken:.0f}" for taken in times]


def main() -> None:
    """Pack, check, measure, print."""
    parser = argparse.ArgumentParser(
        description="Layers against MKL and oneDNN with packed weights."
    )
    parser.add_argument("--only", default="*", help="names or patterns, such as 'bert* vit*'")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=80)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    peers = ("tvmify", "MKL", "oneDNN")
    linear = Table("linear, µs", *peers, "then", *peers, "oneDNN fused", box=None)
    convolution = Table("convolution, µs", "tvmify", "oneDNN fused", box=None)
    with torch.inference_mode():
        for name in chosen(given.only, list(LAYERS)):
            layer = LAYERS[name]
            times = _row(layer, given.rounds)
            if isinstance(layer, Linear):
                what = f"{name} {layer.rows} × {layer.depth} × {layer.columns}"
                linear.add_row(what, *times[:3], layer.then, *times[3:])
            else:
                what = f"{name} {layer.inputs} → {layer.outputs}, {layer.window}² / {layer.stride}"
                convolution.add_row(what, *times)
    for table in (linear, convolution):
        if table.row_count:
            Console(width=120).print(table)


if __name__ == "__main__":
    main()
