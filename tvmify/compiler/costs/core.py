"""One core, its register tiles, and loop nests that are neither products nor convolutions."""

from __future__ import annotations

from dataclasses import dataclass

from tvmify.compiler.costs.source import (
    KERNELS,
    LAYERS,
    SEARCH,
    VMS,
    XEON,
    ZEN4,
    estimate,
    manual,
    measured,
    number,
)


@dataclass(frozen=True)
class Core:
    """One core, and the cost of sharing work among several."""

    #: In each cycle, each unit starts one multiply-add of a whole register.
    clock: float = number(3, "cycles/ns", measured(VMS, "352fc77", SEARCH))
    #: Units of Zen 4 for 512-bit registers, which pass through 256-bit ones.
    zen4_units: int = number(1, "multiply-adds/cycle", measured(ZEN4, "352fc77", SEARCH))
    #: Streaming from L2.
    stream: float = number(20, "bytes/ns", measured(XEON, "cbf17a3", KERNELS))
    #: Weights of direct convolutions, read from beyond L2 during multiply-adds.
    weights: float = number(22, "bytes/ns", measured(VMS, "ce291c1", SEARCH))
    #: A fork and join of two threads.
    fork: float = number(4000, "ns", measured(XEON, "cbf17a3", KERNELS))
    #: A loop nest that takes one core longer than this uses several.
    worth_fork: float = number(
        2.5, "forks", estimate("cbf17a3", "two cores save at most half, and must gain a fork")
    )
    #: Iterations of a loop that suffice to divide it among threads.
    tasks: int = number(16, "tasks", estimate("da711d8", "eight for each of two threads"))
    #: How much more a byte from beyond L2 costs than one from L2.
    far: int = number(
        4,
        "ratio",
        estimate("1041b38", "fits of products have a ratio of 6, those of convolutions of 2"),
    )
    #: The part of L2 for data that are to stay there while others stream through.
    working_set: float = number(
        0.5, "L2 sizes", estimate("cbf17a3", "less than all, since weights and results need room")
    )
    #: A call of a function such as exp, for each element.
    function: int = number(
        20, "multiply-adds", estimate("56a62f0", "the instructions of our polynomials, 15 to 30")
    )


@dataclass(frozen=True)
class Tile:
    """Register tiles: cycles of one step of a reduction, see `kernels.common.tiles.cycles`."""

    #: From a fused multiply-add to the next one on the same sum, on all cores of interest.
    latency: int = number(4, "cycles", manual("cbf17a3", "Intel's and AMD's tables of latencies"))
    #: The most vectors of columns, since memory is read no faster in longer pieces.
    most_vectors: int = number(
        4, "vectors", estimate("cbf17a3", "more leave too few registers for several rows")
    )
    #: In addition to multiply-adds, for each vector of weights, mostly from L2.
    per_vector: float = number(1.05, "cycles", measured(VMS, "341d19b", SEARCH))
    #: Likewise for each row, for the broadcast of its activation.
    per_row: float = number(0.5, "cycles", measured(VMS, "341d19b", SEARCH))
    #: Vector multiply-adds in one iteration of a kernel, so that counters take few slots.
    iteration: int = number(56, "multiply-adds", measured(VMS, "341d19b", SEARCH))
    #: The most steps of the reduction in one iteration, for tiles of few multiply-adds.
    most_steps: int = number(4, "steps", measured(VMS, "341d19b", SEARCH))
    #: Factor for tiles that leave no register for several steps.
    one_by_one: float = number(1.08, "ratio", measured(VMS, "3c5c3ae", SEARCH))
    #: Factor for tiles of an image that its border cuts, or that continue in the next row.
    cut: float = number(1.1, "ratio", measured(VMS, "29ca84a", SEARCH))
    #: The most pixels of a flat tile, whose addresses each take a register.
    most_addresses: int = number(
        8, "pixels", estimate("f7e2003", "half of the 16 general registers of x86")
    )
    #: Of more tiles of symbolic rows, the last one is too small a part to be worth its own code.
    few_tiles: int = number(
        12, "tiles", estimate("806c6e8", "half a tile of 12 is a 24th of the work")
    )
    #: The fewest sums of a tile that are worth its own code.
    fewest_sums: int = number(
        6,
        "vectors",
        estimate("c0b3bf54", "a multiply-add takes 4 cycles, and 1 or 2 start in each"),
    )


@dataclass(frozen=True)
class Nest:
    """Reductions, running sums and element-wise kernels."""

    #: The shortest function that is measured: in a shorter one, the call outweighs any gain.
    worth_measuring: float = number(
        2000, "ns", estimate("0d45495", "a call takes some 500 ns, and a gain is 10 to 30 %")
    )
    #: Variants with and without threads are both measured if the estimate, off by this factor,
    #: would decide differently.
    error: int = number(4, "ratio", measured(ZEN4, "0d45495", LAYERS))
    #: The least elements of a full reduction whose rows are divided among threads.
    worth_splitting: int = number(
        1 << 16, "elements", estimate("3a2a6f4", "one core reads them from L2 in about 3 forks")
    )
    #: The most partial sums of a row.
    most_sums: int = number(
        1024, "sums", estimate("8224f3e", "4 KB: they leave the registers, and stay in L1")
    )
    #: Rows of a running sum that take turns, since each addition waits for the one before.
    carried_rows: int = number(
        8, "rows", estimate("951fc3c", "two units with a latency of 4 cycles start 8 additions")
    )
    #: Columns of a running sum that one task carries.
    carried_columns: int = number(
        64, "columns", estimate("951fc3c", "in float64, 8 of the 32 registers of AVX-512")
    )
    #: An element of a running sum along memory takes as long as so many vectors.
    carried_element: int = number(
        3,
        "vectors",
        estimate("951fc3c", "it waits for a load, an addition and a store, which vectors overlap"),
    )


CORE = Core()
TILE = Tile()
NEST = Nest()
