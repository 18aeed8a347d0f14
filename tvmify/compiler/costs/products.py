"""Matrix products: their plans, prefetches, compact weights, and calls of libraries."""

from __future__ import annotations

from dataclasses import dataclass

from tvmify.compiler.costs.source import (
    FIT,
    KERNELS,
    LAYERS,
    MODELS,
    SEARCH,
    VMS,
    XEON,
    ZEN3,
    ZEN4,
    ZEN5,
    estimate,
    fitted,
    measured,
    number,
)

_SCORES = f'{LAYERS} --threads 1 --only "scores_*"'
_STREAMED = f'{LAYERS} --threads 1 --only "product_* weighted_values"'
_FEW = f'{LAYERS} --threads 1 --only "feed_forward_*"'
_FITTED = fitted(VMS, "29ca84a", FIT)
_SYMBOLIC = estimate("3f61e03", "the largest of five that a script, which was not kept, compared")
_LISTED = estimate("29ca84a", "every compilation pays for ranking the plans")


@dataclass(frozen=True)
class Matmul:
    """How a matrix product is cut, see `kernels.matmul.plan.nanoseconds`."""

    #: The most rows that are multiplied by the rows of an activation without packing it.
    dots_rows: int = number(128, "rows", measured(ZEN3, "8ce13f4", _SCORES))
    #: For so many lanes of a column's sums, one of each row, a step of the reduction makes up for
    #: adding them at its end.
    dots_steps: int = number(16, "lanes/step", measured(ZEN3, "8ce13f4", _SCORES))
    #: The same as `dots_rows` for rows that are multiplied by the columns of an activation.
    streamed_rows: int = number(32, "rows", measured(ZEN3, "01f55d5", _STREAMED))
    #: Of these columns and elements of the reduction, the sums stay in L1, and rows of the
    #: activation are read side by side.
    streamed_columns: int = number(512, "columns", measured(ZEN3, "01f55d5", _STREAMED))
    chunk: int = number(32, "elements", measured(ZEN3, "01f55d5", _STREAMED))
    #: Symbolic sizes of a product of two activations are planned for at least so many rows and
    #: columns, and elements of the reduction, since a plan for many serves few as well.
    any_side: int = number(128, "rows", _SYMBOLIC)
    any_depth: int = number(512, "elements", _SYMBOLIC)
    #: One cycle of `kernels.common.tiles.cycles`.
    cycle: float = number(0.66, "cycles", _FITTED)
    #: Weights read from memory.
    far_byte: float = number(0.035, "ns/byte", _FITTED)
    #: Weights that a core reads again; twice that without prefetching.
    near_byte: float = number(0.006, "ns/byte", _FITTED)
    #: Adding the sums of a further block of the reduction.
    sum_byte: float = number(0.018, "ns/byte", _FITTED)
    #: Reading the left-hand side again if it does not fit in L2.
    left_byte: float = number(0.012, "ns/byte", measured(XEON, "a1215ef", MODELS))
    #: Writing a result larger than L2 by columns.
    result_byte: float = number(0.04, "ns/byte", _FITTED)
    #: The part of the left-hand side that another core wrote, beyond a core's own share of rows.
    foreign_byte: float = number(0.02, "ns/byte", measured(XEON, "a1215ef", SEARCH))
    #: Weights that a tile reads from L2, if a block of the panel is larger than `spills`.
    spilled_byte: float = number(0.0014, "ns/byte", measured(XEON, "9ddd90d", SEARCH))
    spills: float = number(1.5, "L1 sizes", measured(XEON, "9ddd90d", SEARCH))
    #: Factor for the weights of a single tile, unless L2 keeps them.
    single_tile: float = number(1.1, "ratio", measured(ZEN4, "c0b3bf54", _FEW))
    #: Multiply-adds of more rows than this hide the latency of weights from memory, except for a
    #: share that falls with their square.
    hiding: int = number(32, "rows", measured(XEON, "2e1764e", SEARCH))
    #: Rows with a stride of a multiple of this map to the same set of L1.
    aliasing: int = number(4096, "bytes", measured(ZEN4, "352fc77", SEARCH))
    #: Rows of one set that fit in L1.
    ways: int = number(10, "rows", measured(ZEN4, "352fc77", SEARCH))
    #: Additional share of time for each further row.
    crowded: float = number(0.08, "ratio", measured(ZEN4, "352fc77", SEARCH))
    #: Sizes of one block of a panel: a little more than L1 is fast, as sums are stored less often.
    panels: tuple[float, ...] = number((1.25, 0.625), "L1 sizes", measured(VMS, "27b3054", SEARCH))
    #: The same if L2 keeps all weights from call to call.
    nearby_panels: tuple[float, ...] = number(
        (1.25, 0.625, 4), "L1 sizes", measured(VMS, "27b3054", SEARCH)
    )
    #: How much shorter than the limit blocks of equal length may be.
    even: int = number(3, "ratio", _LISTED)
    #: Numbers of blocks of rows that are considered.
    blocks: tuple[int, ...] = number((1, 2, 4, 8), "blocks", _LISTED)
    #: Further numbers of blocks of rows: those that give this many tasks.
    tasks: tuple[int, ...] = number((8, 16, 32), "tasks", _LISTED)
    #: Register tiles that are combined with everything else.
    tiles: int = number(8, "tiles", _LISTED)
    #: Candidates that are listed for their estimates alone.
    runners_up: int = number(3, "plans", _LISTED)
    #: The estimate is the sum over machines with these numbers of cores, since one program serves
    #: all of them.
    cores: tuple[int, ...] = number(
        (2, 4), "cores", estimate("29ca84a", "a batch of one runs on machines of few cores")
    )
    #: If the number of rows is a symbol, panels are as wide as for this number.
    common_rows: int = number(
        128, "rows", estimate("f3cd202", "the rows of a sentence, between 1 and 512")
    )
    #: The plan is then the best on average for these multiples of the likely number, whose last
    #: tiles are full to different parts.
    likely: tuple[float, ...] = number(
        (0.36, 0.48, 0.6, 0.73, 0.85, 0.98, 1.1, 1.3),
        "ratio",
        estimate("005f49d", "a third to a third more of the likely number, which is near the most"),
    )
    #: The most panels of columns for which rows are multiplied by their gate repeatedly; for more,
    #: a separate pass is cheaper.
    few_gated_panels: int = number(
        2, "panels", estimate("6d748e0", "a pass reads and writes the rows once")
    )
    #: The most columns per row for which rows are prefetched.
    wide: int = number(8, "columns/row", measured(XEON, "f412a1e", KERNELS))


@dataclass(frozen=True)
class Prefetch:
    """Prefetching."""

    #: The next block of up to this size is prefetched into L1, and the one after it into L2.
    small_block: int = number(16 << 10, "bytes", measured(ZEN5, "979deab", MODELS))
    #: How far ahead a single tile prefetches from memory, and where it unpacks compact weights.
    distance: int = number(8192, "bytes", measured(ZEN4, "c0b3bf54", _FEW))
    compact_distance: int = number(2048, "bytes", measured(XEON, "1b0824d", SEARCH))
    #: The most multiply-adds for each line of weights with which it does not prefetch.
    quick: int = number(6, "instructions", measured(ZEN4, "c0b3bf54", _FEW))


@dataclass(frozen=True)
class Compact:
    """Weights that are unpacked in registers: those of 24 bits, and bfloat16."""

    #: Total weights of a program's products from which none stay in a cache between calls.
    distant: int = number(
        128 << 20, "bytes", estimate("ac2d97d", "more than most L3 caches, less than GPT-2 reads")
    )
    #: Narrower vectors unpack slower than memory delivers.
    narrowest: int = number(
        256, "bits", estimate("ac2d97d", "25 instructions unpack four vectors, of any width")
    )
    #: The part of the registers for sums.
    sums: float = number(
        2 / 3, "registers", estimate("ac2d97d", "the rest is for unpacking four vectors")
    )
    #: Without an instruction for pairs of bfloat16, the most rows for which weights are unpacked,
    #: relative to the lanes of a register.
    few_unpacked: int = number(2, "1/lanes", measured(VMS, "352fc77", LAYERS))


@dataclass(frozen=True)
class Library:
    """PyTorch's own libraries."""

    #: The fewest rows for which one is tried.
    rows: int = number(
        32, "rows", estimate("b0deaa0", "with fewer, reading the weights takes all the time")
    )
    #: Multiply-adds of bfloat16 that AMX starts while two units for pairs start one.
    tiled: int = number(
        8, "ratio", estimate("b0deaa0", "Intel's specification: 16 x 16 x 32 in 16 cycles")
    )
    #: The overhead of a call.
    call: float = number(10_000, "ns", estimate("b0deaa0", "some calls of PyTorch's dispatcher"))
    #: Traffic for each weight that is reordered, and each element of a result that another kernel
    #: activates: both are written and read once more.
    again: int = number(4, "bytes", estimate("b0deaa0", "two bytes written, two read"))


MATMUL = Matmul()
PREFETCH = Prefetch()
COMPACT = Compact()
LIBRARY = Library()
