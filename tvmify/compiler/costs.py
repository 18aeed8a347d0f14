"""Every measured number of the CPU schedules: costs, and the sizes from which things pay off.

Rules and plans contain no numbers of their own; they name a field of these classes. Each field has
a unit and a `Source`: machine, commit and command. ``python -m benchmarks.fit`` fits those of
matrix products to measured times.

Limits that keep results accurate (the length of one sum) or compile times short are not costs, and
are defined where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Source:
    """Where a number comes from.

    Attributes
    ----------
    machine
        The machine of the measurement.
    commit
        The commit of this repository.
    command
        The command that measures it; ``"estimate"`` if nothing was measured.
    """

    machine: str
    commit: str
    command: str


_VMS = "2-core virtual machines: Xeon (AVX-512), EPYC Zen 2 and 3 (AVX2), EPYC Zen 4"
_XEON = "2-core virtual machine: Xeon (AVX-512)"
_ZEN3 = "2-core virtual machine: EPYC (AVX2)"
_ZEN4 = "2-core virtual machine: EPYC Zen 4"
_SEARCH = "python -m benchmarks.heuristic measure"
_LAYERS = "python -m benchmarks.operators"
_MODELS = "python -m benchmarks.run"
_KERNELS = "python -m benchmarks.kernels"

#: Source of numbers that were fitted together to the times of 923 kernels: non-negative least
#: squares of relative errors, within 13 %.
_FIT = Source(_VMS, "29ca84a", "python -m benchmarks.heuristic measure")
#: Source of what products of symbolic sizes are planned for.
_SYMBOLIC = Source(_ZEN3, "3f61e03", "a script that was not kept")
_WINOGRAD_FIT = Source(_VMS, "59e0396", "python -m benchmarks.heuristic measure")


def _estimate(commit: str) -> Source:
    return Source("none", commit, "estimate")


def _number(value: Any, unit: str, source: Source) -> Any:
    """Return a field of a table: its default is the number."""
    return field(default=value, metadata={"unit": unit, "source": source})


class Number(NamedTuple):
    """A number with its unit, and where it was measured."""

    value: Any
    unit: str
    source: Source


def numbers(table: Any) -> dict[str, Number]:
    """Return the fields of a table by name."""
    return {
        one.name: Number(getattr(table, one.name), one.metadata["unit"], one.metadata["source"])
        for one in fields(table)
    }


@dataclass(frozen=True)
class Core:
    """One core, and the cost of sharing work among several."""

    #: In each cycle, each unit starts one multiply-add of a whole register.
    clock: float = _number(3, "cycles/ns", Source(_VMS, "352fc77", _SEARCH))
    #: Streaming from L2.
    stream: float = _number(20, "bytes/ns", Source(_XEON, "cbf17a3", _KERNELS))
    #: Weights of direct convolutions, read from beyond L2 during multiply-adds.
    weights: float = _number(22, "bytes/ns", Source(_VMS, "ce291c1", _SEARCH))
    #: A fork and join of two threads: 3 to 5 µs.
    fork: float = _number(4000, "ns", Source(_XEON, "cbf17a3", _KERNELS))
    #: A loop nest that takes one core longer than this uses several.
    worth_fork: float = _number(2.5, "forks", _estimate("cbf17a3"))
    #: How much more a byte from beyond L2 costs than one from L2.
    far: int = _number(4, "ratio", _estimate("1041b38"))


@dataclass(frozen=True)
class Tile:
    """Register tiles: cycles of one step of a reduction, see `kernels.common.tiles.cycles`."""

    #: From a fused multiply-add to the next one on the same sum, on all cores of interest.
    latency: int = _number(4, "cycles", Source("manuals of Intel and AMD", "cbf17a3", "estimate"))
    #: The most vectors of columns. Memory is read no faster in longer pieces.
    most_vectors: int = _number(4, "vectors", Source(_VMS, "cbf17a3", _SEARCH))
    #: In addition to multiply-adds, for each vector of weights, mostly from L2. With 1.05, 145
    #: products lose 2.5 % in the mean with AVX-512, with 0.75 3.2 %; with AVX2 1.8 and 1.9 %.
    per_vector: float = _number(1.05, "cycles", Source(_VMS, "341d19b", _SEARCH))
    #: Likewise for each row, for the broadcast of its activation.
    per_row: float = _number(0.5, "cycles", Source(_VMS, "341d19b", _SEARCH))
    #: Vector multiply-adds in one iteration of a kernel. Two steps of 9 × 48, 14 × 32 and
    #: 7 × 2 × 32 take 1 to 2 % less than one (AVX-512).
    iteration: int = _number(56, "multiply-adds", Source(_VMS, "341d19b", _SEARCH))
    #: The most steps of the reduction in one iteration. With one step of 6 × 16 sums, every third
    #: instruction is loop overhead or a prefetch: if the sibling thread is busy, four steps are a
    #: tenth to a fifth faster (ResNet-50, AVX2).
    most_steps: int = _number(4, "steps", Source(_VMS, "341d19b", _SEARCH))
    #: Factor for tiles that leave no register for several steps.
    one_by_one: float = _number(1.08, "ratio", Source(_VMS, "3c5c3ae", _SEARCH))
    #: Factor for tiles of an image that its border cuts, or that continue in the next row: at 28 ×
    #: 28 and 56 × 56, stride 2, tiles that divide a row took 0.8 to 1.06 of their time.
    cut: float = _number(1.1, "ratio", Source(_VMS, "29ca84a", _SEARCH))
    #: The most pixels of a flat tile, whose addresses each take a register.
    most_addresses: int = _number(8, "pixels", Source(_XEON, "f7e2003", _SEARCH))


@dataclass(frozen=True)
class Matmul:
    """How a matrix product is cut, see `kernels.matmul.plan.nanoseconds`."""

    #: The most rows that are multiplied by the rows of an activation without packing it.
    dots_rows: int = _number(128, "rows", Source(_ZEN3, "8ce13f4", _LAYERS))
    #: For so many lanes of a column's sums, one of each row, a step of the reduction makes up for
    #: adding them at its end: 16 rows of 64 elements, 96 of 384 (AVX2).
    dots_steps: int = _number(16, "lanes/step", Source(_ZEN3, "8ce13f4", _LAYERS))
    #: The same for rows that are multiplied by the columns of an activation.
    streamed_rows: int = _number(32, "rows", Source(_ZEN3, "01f55d5", _LAYERS))
    #: Of these columns and elements of the reduction, the sums stay in L1, and rows of the
    #: activation are read side by side. With 8 elements, 8 rows take 1.5 times as long.
    streamed_columns: int = _number(512, "columns", Source(_ZEN3, "01f55d5", _LAYERS))
    chunk: int = _number(32, "elements", Source(_ZEN3, "01f55d5", _LAYERS))
    #: Symbolic sizes of a product of two activations are planned for at least so many rows and
    #: columns, and elements of the reduction. A plan for few takes several times as long for many,
    #: while one for many serves few as well: docs/measurements/gemm-plans.md.
    any_side: int = _number(128, "rows", _SYMBOLIC)
    any_depth: int = _number(512, "elements", _SYMBOLIC)
    #: One cycle of `kernels.common.tiles.cycles`.
    cycle: float = _number(0.66, "cycles", _FIT)
    #: Weights read from memory.
    far_byte: float = _number(0.035, "ns/byte", _FIT)
    #: Weights that a core reads again; twice that without prefetching.
    near_byte: float = _number(0.006, "ns/byte", _FIT)
    #: Adding the sums of a further block of the reduction.
    sum_byte: float = _number(0.018, "ns/byte", _FIT)
    #: Reading the left-hand side again if it does not fit in L2. The fit gave 0.007, but with this
    #: value Whisper's products, in blocks of rows, take 0.87 of the time (a Xeon).
    left_byte: float = _number(0.012, "ns/byte", _FIT)
    #: Writing a result larger than L2 by columns.
    result_byte: float = _number(0.04, "ns/byte", _FIT)
    #: The part of the left-hand side that another core wrote, beyond a core's own share of rows. By
    #: rows, products of 14 × 14 images took 0.84 to 0.96 of the time.
    foreign_byte: float = _number(0.02, "ns/byte", Source(_XEON, "a1215ef", _SEARCH))
    #: Weights that a tile reads from L2, if a block of the panel is larger than `spills` times L1.
    #: For 145 products, the mean loss fell from 3.8 to 3.5 % (AVX-512), with 0.001 to 0.005.
    spilled_byte: float = _number(0.0014, "ns/byte", Source(_XEON, "9ddd90d", _SEARCH))
    #: See `spilled_byte`.
    spills: float = _number(1.5, "L1 sizes", Source(_XEON, "9ddd90d", _SEARCH))
    #: Factor for the weights of a single tile, unless L2 keeps them.
    single_tile: float = _number(1.25, "ratio", Source(_XEON, "1b0824d", _SEARCH))
    #: Multiply-adds of more rows than this hide the latency of weights from memory, except for a
    #: share that falls with their square: two cores that each read all weights for half of 128 or
    #: 197 rows take 0.98 to 1.02 times as long as two that divide the weights (AVX-512).
    hiding: int = _number(32, "rows", Source(_XEON, "2e1764e", _SEARCH))
    #: Rows with a stride of a multiple of this map to the same set of L1.
    aliasing: int = _number(4096, "bytes", Source(_ZEN4, "352fc77", _SEARCH))
    #: Rows of one set that fit in L1.
    ways: int = _number(10, "rows", Source(_ZEN4, "352fc77", _SEARCH))
    #: Additional share of time for each further row. Tiles of 10, 12 and 14 rows of 1024 or 2048
    #: elements took 1.03, 1.15 and 1.33 times as long as those of 960, 1040 or 512.
    crowded: float = _number(0.08, "ratio", Source(_ZEN4, "352fc77", _SEARCH))
    #: Sizes of one block of a panel. With prefetching, a little more than L1 is fast: sums are
    #: stored less often.
    panels: tuple[float, ...] = _number((1.25, 0.625), "L1 sizes", Source(_VMS, "27b3054", _SEARCH))
    #: The same if L2 keeps all weights from call to call.
    nearby_panels: tuple[float, ...] = _number(
        (1.25, 0.625, 4), "L1 sizes", Source(_VMS, "27b3054", _SEARCH)
    )
    #: Tiles of at most this many rows read weights as fast as L1 delivers them; a block must fit in
    #: L1 together with the next one. Products of 4 rows: a fifth faster (AVX2).
    few_rows: int = _number(2, "rows", Source(_VMS, "f8bd6aa", _SEARCH))
    #: Sizes of a block for such tiles.
    few_rows_panels: tuple[float, ...] = _number(
        (0.625,), "L1 sizes", Source(_VMS, "f8bd6aa", _SEARCH)
    )
    #: How much shorter than the limit blocks of equal length may be.
    even: int = _number(3, "ratio", Source(_VMS, "1d43b97", _SEARCH))
    #: Numbers of blocks of rows that are considered.
    blocks: tuple[int, ...] = _number((1, 2, 4, 8), "blocks", _estimate("29ca84a"))
    #: Further numbers of blocks of rows: those that give this many tasks.
    tasks: tuple[int, ...] = _number((8, 16, 32), "tasks", _estimate("29ca84a"))
    #: Register tiles that are combined with everything else.
    tiles: int = _number(8, "tiles", _estimate("29ca84a"))
    #: Candidates that are listed for their estimates alone.
    runners_up: int = _number(3, "plans", _estimate("29ca84a"))
    #: The estimate is the sum over machines with these numbers of cores, since one program serves
    #: all of them.
    cores: tuple[int, ...] = _number((2, 4), "cores", _estimate("29ca84a"))
    #: The most panels of columns for which rows are multiplied by their gate repeatedly; for more,
    #: a separate pass is cheaper.
    few_gated_panels: int = _number(2, "panels", _estimate("6d748e0"))
    #: The most columns per row for which rows are prefetched.
    wide: int = _number(8, "columns/row", Source(_XEON, "f412a1e", _KERNELS))


@dataclass(frozen=True)
class Winograd:
    """Winograd convolutions, see `kernels.conv.winograd.plan.Cut.nanoseconds`.

    Fitted within 13 % to the times of 77 kernels that are close to the fastest for their shape, and
    corrected by those of 29 shapes with AVX-512 and AVX2.
    """

    #: A multiply-add, relative to the direct kernel.
    product: float = _number(1.05, "multiply-adds", _WINOGRAD_FIT)
    #: Transforming one input.
    input: float = _number(14, "multiply-adds", _WINOGRAD_FIT)
    #: Transforming one result.
    result: float = _number(6, "multiply-adds", _WINOGRAD_FIT)
    #: Weights, unless products take longer and hide the latency of memory. Measured in networks:
    #: with 0.065, as single kernels suggest, ResNet-18 takes 7 % longer on a busy machine.
    weight_byte: float = _number(0.08, "ns/byte", _WINOGRAD_FIT)
    #: Weights that the next chunk reads again, unless half of them fit in L2. The tiles of a chunk
    #: that share registers hide their latency together.
    again_byte: float = _number(0.021, "ns/byte", _WINOGRAD_FIT)
    #: Transformed inputs that go through memory.
    stored_byte: float = _number(0.057, "ns/byte", _WINOGRAD_FIT)
    #: The same, for each tile of channels that reads them.
    read_byte: float = _number(0.05, "ns/byte", _WINOGRAD_FIT)
    #: Transformed inputs of at most this size stay in L2 and L3, and are read in a third of the
    #: time.
    nearby: int = _number(1 << 20, "bytes", Source(_XEON, "3a9a168", _SEARCH))
    #: The same relative to L2 (images of 1.0 to 2.5 MB, stride 2).
    nearby_l2: float = _number(2.5, "L2 sizes", Source(_XEON, "3a9a168", _SEARCH))
    #: Sums of planes, whose reductions are short, if those of a group are kept: a 7 × 7 stem.
    sum_byte: float = _number(0.021, "ns/byte", Source(_XEON, "1193153", _SEARCH))
    #: The same if those of a whole row are kept in L2: a 5 × 5 stem with rows of 73 tiles.
    far_sum_byte: float = _number(0.0625, "ns/byte", Source(_XEON, "1193153", _SEARCH))
    #: How many of the best tiles of planes are searched for one that divides a row.
    near_best: int = _number(6, "tiles", Source(_XEON, "1193153", _SEARCH))
    #: The gain that justifies it, since the direct kernel is more accurate.
    margin: float = _number(50_000, "ns", Source(_VMS, "d620462", _SEARCH))
    #: The same for transforming all inputs before the first product, which takes a second fork.
    shared_margin: float = _number(5, "forks", Source(_VMS, "d620462", _SEARCH))
    #: Additional cycles of a step for each row of a tile, since inputs come from L2. Narrower tiles
    #: read them more often, and took 5 to 30 % longer.
    far_row: float = _number(0.125, "cycles", Source(_XEON, "d620462", _SEARCH))
    #: Chunks with separate inputs are made small enough that there are this many.
    few_chunks: int = _number(8, "chunks", _estimate("d620462"))
    #: Bands of rows of planes, likewise; they read some rows twice, and half as many take 2 % less.
    few_bands: int = _number(16, "bands", Source(_XEON, "d8866e1", _SEARCH))


@dataclass(frozen=True)
class Convolution:
    """Direct, depthwise and expanded depthwise convolutions, and pools."""

    #: One block of weights. Half as much takes a seventh longer with AVX2, and 2 % less time with
    #: AVX-512; without blocks it takes 20 to 40 % longer (512 channels at 7 × 7).
    panel: float = _number(1.25, "L1 sizes", Source(_VMS, "f7e2003", _SEARCH))
    #: The numbers of cores on which bands of rows should be balanced, as `Matmul.cores`.
    cores: tuple[int, ...] = _number((2, 4, 8), "cores", _estimate("994c049"))
    #: Fewer tasks cannot be divided among the cores of a small machine.
    few_tasks: int = _number(4, "tasks", _estimate("9ddd90d"))
    #: This many rows of tiles are balanced well enough: seven cost two cores a seventh (ViT).
    many_rows: int = _number(8, "rows", Source(_VMS, "9ddd90d", _SEARCH))
    #: With at most this many blocks it does not pay to store the sums of each, if L1 cannot hold
    #: them: 14 % at 56 × 56 × 96 → 192, stride 2, with AVX-512, 5 % at 56 × 56 × 128 with AVX2.
    few_blocks: int = _number(2, "blocks", Source(_VMS, "9ddd90d", _SEARCH))
    #: Reductions over at most this many input channels are unrolled.
    few_channels: int = _number(4, "channels", _estimate("09e627f"))
    #: Images of more channels are read as vectors of channels, not as planes.
    planar_channels: int = _number(4, "channels", _estimate("4cd64de"))
    #: Output rows of one task of a channel-wise kernel: few enough to give a small image several
    #: tasks.
    rows_per_task: int = _number(8, "rows", _estimate("1041b38"))
    #: Larger windows than 5 × 5 stay loops: unrolled code would not fit in the cache.
    unrolled_window: int = _number(25, "places", _estimate("994c049"))
    #: Computed rows of the wide image, relative to its rows; beyond this, writing it and reading it
    #: again is cheaper.
    most_repeated: float = _number(1.5, "ratio", _estimate("994c049"))


@dataclass(frozen=True)
class Attention:
    """Attention kernels."""

    #: Queries that share each read of keys and values that do not fit in L2: a sixth faster than
    #: the 16 of one tile (AVX2).
    far_queries: int = _number(48, "queries", Source(_VMS, "c0af7c7", _LAYERS))
    #: The inverse of the share of L1 for the scores of a block.
    scores: int = _number(3, "1/L1 sizes", _estimate("c0af7c7"))
    #: If queries are few, the number of queries per loaded key. With `keys`, 16 sums hide the
    #: latency of additions.
    rows: int = _number(4, "queries", _estimate("0087fb3"))
    #: Keys that are multiplied at a time.
    keys: int = _number(4, "keys", _estimate("0087fb3"))
    #: Vectors of a head whose weighted values are summed at a time for each query.
    vectors: int = _number(4, "vectors", _estimate("0087fb3"))


@dataclass(frozen=True)
class Prefetch:
    """Prefetching, and compact weights."""

    #: The next block of up to this size is prefetched into L1, and the one after it into L2.
    #: ResNet-18 takes 0.98 of the time (Zen 5), 0.96 (a Xeon).
    small_block: int = _number(16 << 10, "bytes", Source(_XEON, "979dead", _MODELS))
    #: How far ahead a core prefetches from memory; twice and half of it are slower (products of 1
    #: to 12 rows).
    distance: int = _number(2048, "bytes", Source(_XEON, "1b0824d", _SEARCH))
    #: Total weights of a program's products from which none stay in a cache between calls.
    #: Unpacking weights that do takes 1.7 times as long as reading them uncompressed (9 MB in an L3
    #: of 32 MB).
    distant: int = _number(128 << 20, "bytes", Source(_VMS, "ac2d97d", _MODELS))
    #: Narrower vectors unpack slower than memory delivers.
    narrowest: int = _number(256, "bits", _estimate("ac2d97d"))
    #: Without an instruction for pairs of bfloat16, the most rows for which weights are unpacked,
    #: relative to the lanes of a register: products of 1 to 4 rows take 0.4 to 0.6 of the time, of
    #: 8 rows 0.6 to 0.8 with AVX-512 and 0.8 to 1.2 with AVX2.
    few_unpacked: int = _number(2, "1/lanes", Source(_VMS, "352fc77", _LAYERS))


@dataclass(frozen=True)
class Library:
    """PyTorch's own libraries."""

    #: Multiply-adds of bfloat16 that AMX starts while two units for pairs start one: 16 × 16 × 32
    #: in 16 cycles, from the specification alone.
    tiled: int = _number(8, "ratio", _estimate("b0deaa0"))
    #: The overhead of a call.
    call: float = _number(10_000, "ns", _estimate("b0deaa0"))
    #: Traffic for each weight that is reordered, and each element of a result that another kernel
    #: activates: both are written and read once more.
    again: int = _number(4, "bytes", _estimate("b0deaa0"))


@dataclass(frozen=True)
class Nest:
    """Other loop nests."""

    #: The shortest function that is measured: of a shorter one, the gain of a better schedule is
    #: lost in the overhead of the call.
    worth_measuring: float = _number(2000, "ns", _estimate("0d45495"))
    #: Variants with and without threads are both measured if the estimate, off by this factor,
    #: would decide differently. Estimates led to forks that were too early by up to a factor of
    #: two.
    error: int = _number(4, "ratio", Source(_ZEN4, "0d45495", _LAYERS))
    #: The multiply-adds of vectors (0.5 µs) that merging narrow products must save: 64 and 512
    #: inputs, 2 to 16 columns in two to four heads, 1 to 256 rows.
    worth_merging: int = _number(1 << 14, "multiply-adds", Source(_XEON, "f412a1e", _LAYERS))
    #: The most vectors of each gate of a recurrent layer. Three and four were never faster.
    most_gate_vectors: int = _number(2, "vectors", Source(_VMS, "bb9e067", _LAYERS))
    #: The least elements of a full reduction whose rows are divided among threads.
    worth_splitting: int = _number(1 << 16, "elements", _estimate("3a2a6f4"))
    #: Channels that fill a small vector: images with fewer are resampled without transposing.
    many_channels: int = _number(8, "channels", _estimate("543e028"))


CORE = Core()
TILE = Tile()
MATMUL = Matmul()
WINOGRAD = Winograd()
CONVOLUTION = Convolution()
ATTENTION = Attention()
PREFETCH = Prefetch()
LIBRARY = Library()
NEST = Nest()
