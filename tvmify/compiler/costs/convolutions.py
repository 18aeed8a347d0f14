"""Convolutions and pools."""

from __future__ import annotations

from dataclasses import dataclass

from tvmify.compiler.costs.source import (
    MODELS,
    SEARCH,
    VMS,
    XEON,
    ZEN3,
    estimate,
    fitted,
    measured,
    number,
)

_FIT = fitted(VMS, "59e0396", SEARCH)
_PIXELS = estimate("994c049", "a batch of one runs on machines of few cores")


@dataclass(frozen=True)
class Winograd:
    """Winograd convolutions, see `kernels.conv.winograd.plan.Cut.nanoseconds`."""

    #: A multiply-add, relative to the direct kernel.
    product: float = number(1.05, "multiply-adds", _FIT)
    #: Transforming one input.
    input: float = number(14, "multiply-adds", measured(VMS, "59e0396", SEARCH))
    #: Transforming one result.
    result: float = number(6, "multiply-adds", measured(VMS, "59e0396", SEARCH))
    #: Weights, unless products take longer and hide the latency of memory.
    weight_byte: float = number(0.08, "ns/byte", measured(XEON, "59e0396", MODELS))
    #: Weights that the next chunk reads again, unless half of them fit in L2.
    again_byte: float = number(0.021, "ns/byte", _FIT)
    #: Transformed inputs that go through memory.
    stored_byte: float = number(0.057, "ns/byte", _FIT)
    #: The same, for each tile of channels that reads them.
    read_byte: float = number(0.05, "ns/byte", measured(VMS, "59e0396", SEARCH))
    #: The same if they stay in L2 and L3: a third.
    nearby_read_byte: float = number(0.05 / 3, "ns/byte", measured(XEON, "3a9a168", SEARCH))
    #: Transformed inputs of at most this size stay in L2 and L3.
    nearby: int = number(5 << 18, "bytes", measured(ZEN3, "4488ff08", SEARCH))
    #: The same relative to L2.
    nearby_l2: float = number(2.5, "L2 sizes", measured(XEON, "3a9a168", SEARCH))
    #: Sums of planes, whose reductions are short, if those of a group are kept.
    sum_byte: float = number(0.021, "ns/byte", measured(XEON, "1193153", SEARCH))
    #: The same if those of a whole row are kept in L2.
    far_sum_byte: float = number(0.0625, "ns/byte", measured(XEON, "1193153", SEARCH))
    #: How many of the best tiles of planes are searched for one that divides a row.
    near_best: int = number(6, "tiles", estimate("1193153", "further ones are too slow to pay"))
    #: The gain that justifies it, since the direct kernel is more accurate.
    margin: float = number(
        50_000, "ns", estimate("d620462", "the error of the estimates for small images")
    )
    #: The same for transforming all inputs before the first product, which takes a second fork.
    shared_margin: float = number(
        5, "forks", estimate("d620462", "a second fork, and what the cores wait for each other")
    )
    #: Additional cycles of a step for each row of a tile, since inputs come from L2.
    far_row: float = number(0.125, "cycles", measured(XEON, "d620462", SEARCH))
    #: Chunks with separate inputs are made small enough that there are this many.
    few_chunks: int = number(
        8, "chunks", estimate("d620462", "two tasks for each of four cores even out their times")
    )
    #: Bands of rows of planes, likewise; they read some rows twice.
    few_bands: int = number(
        16, "bands", estimate("d8866e1", "half as many take 2 % less, but serve fewer cores")
    )


@dataclass(frozen=True)
class Convolution:
    """Direct, depthwise and expanded depthwise convolutions, pools and resized images."""

    #: One block of weights, which stays in L1 while all pixels meet it.
    panel: float = number(1.25, "L1 sizes", measured(VMS, "f7e2003", SEARCH))
    #: The numbers of cores on which bands of rows should be balanced, as `Matmul.cores`.
    cores: tuple[int, ...] = number((2, 4, 8), "cores", _PIXELS)
    #: Fewer tasks cannot be divided among the cores of a small machine.
    few_tasks: int = number(4, "tasks", estimate("9ddd90d", "the cores of a small machine"))
    #: This many rows of tiles are balanced well enough.
    many_rows: int = number(8, "rows", measured(VMS, "9ddd90d", SEARCH))
    #: With at most this many blocks it does not pay to store the sums of each, if L1 cannot hold
    #: them.
    few_blocks: int = number(2, "blocks", measured(VMS, "9ddd90d", SEARCH))
    #: Reductions over at most this many input channels are unrolled.
    few_channels: int = number(
        4, "channels", estimate("09e627f", "photographs have 3 or 4, and more make long code")
    )
    #: Images of more channels are read as vectors of channels, not as planes.
    planar_channels: int = number(
        4, "channels", estimate("4cd64de", "more begin to fill a vector of 8 lanes")
    )
    #: Channels that fill a small vector: images with fewer are resampled without transposing.
    many_channels: int = number(
        8, "channels", estimate("543e028", "fewer leave a vector of AVX2 partly empty")
    )
    #: Output rows of one task of a channel-wise kernel, so that a small image has several tasks.
    rows_per_task: int = number(
        8, "rows", estimate("1041b38", "a 3 x 3 window then reads a quarter of the rows twice")
    )
    #: Larger windows stay loops, since unrolled code would not fit in the cache.
    unrolled_window: int = number(
        25,
        "places",
        estimate("994c049", "5 x 5 for a tile of pixels are some hundred instructions"),
    )
    #: Computed rows of the wide image, relative to its rows; beyond this, writing it and reading it
    #: again is cheaper.
    most_repeated: float = number(
        1.5, "ratio", estimate("994c049", "one kernel takes 0.5 to 1.0 of the time of two")
    )
    #: The part of the registers for sums if groups of few channels lie side by side.
    grouped_sums: float = number(
        0.25, "registers", estimate("38eb468", "LLVM keeps a vector of inputs for each pixel, too")
    )


WINOGRAD = Winograd()
CONVOLUTION = Convolution()
