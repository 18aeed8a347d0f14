"""How a matrix product is cut: register tile (mr × nr), reduction block (kc), row block (mc)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tvmify.compiler.costs import CORE, MATMUL
from tvmify.compiler.kernels.common import choice, tiles
from tvmify.compiler.kernels.common.sums import LONGEST_SUM, longest_sum, split_evenly
from tvmify.compiler.microarchitecture import Microarchitecture

if TYPE_CHECKING:
    from tvmify.compiler.kernels.common.sample import Sample


@dataclass(frozen=True)
class Plan:
    """One way to cut a product.

    Attributes
    ----------
    rows, columns
        The tile of sums that stays in registers.
    depth
        Elements of the reduction that are accumulated in registers (kc). The last block may have
        fewer.
    block
        How many tiles of rows in turn are multiplied by the same panel of the right-hand side.
    rows_first
        Whether all columns of one block of rows come before the next block.
    """

    rows: int
    columns: int
    depth: int
    block: int
    rows_first: bool

    def __str__(self) -> str:
        order = "rows" if self.rows_first else "columns"
        return f"{self.rows}x{self.columns} depth {self.depth} block {self.block} {order} first"


@dataclass(frozen=True)
class Workload:
    """One or `batch` matrix products of activations with weights or with activations.

    Attributes
    ----------
    packed
        Whether the right-hand side is a weight.
    row_stride
        The row stride of the left-hand side, in rows.
    """

    batch: int
    rows: int
    columns: int
    depth: int
    dtype: str
    packed: bool
    row_stride: int = 1

    def __str__(self) -> str:
        kind = "packed matmul" if self.packed else "matmul"
        stride = f" row stride {self.row_stride}" * (self.row_stride > 1)
        return f"{kind} {self.batch}x{self.rows}x{self.depth}x{self.columns} {self.dtype}{stride}"


def choose(
    work: Workload,
    machine: Microarchitecture,
    bits: int,
    sample: Callable[[], Sample] | None = None,
) -> Plan:
    """Choose a plan; the alternatives are for measurements, see `choice.choose`."""
    return choice.choose(str(work), choice.once(candidates, work, machine, bits), sample)


def choose_for_any_rows(work: Workload, factor: int, machine: Microarchitecture, bits: int) -> Plan:
    """Choose a plan for the likely number of rows, with panels as wide as for any other number. So
    all programs of a layer read the same packed weights.

    Parameters
    ----------
    factor
        A factor of the number of rows. If tiles divide it, TVM simplifies their number so far that
        it can no longer prove that they cover all rows.
    """
    common = candidates(replace(work, rows=MATMUL.common_rows), machine, bits)[0]
    most = min(work.rows, common.rows)
    within = (t for t in tiles.candidates(machine, bits, work.columns) if t.rows <= most)
    alike = [tile for tile in within if tile.columns == common.columns]
    alike = [tile for tile in alike if factor == 1 or factor % tile.rows] or alike
    likely = [replace(work, rows=max(round(work.rows * part), 1)) for part in MATMUL.likely]

    def cost(plan: Plan) -> float:
        """Return the average time for a row."""
        return sum(
            _on_all_cores(each, _within(plan, each.rows), machine, bits) / each.rows
            for each in likely
        )

    return min((p for tile in alike for p in _plans(work, tile, machine, bits)), key=cost)


def _within(plan: Plan, rows: int) -> Plan:
    """Return the plan with as many tiles in a block as this number of rows has on average."""
    row_tiles = -(-rows // plan.rows)
    return replace(plan, block=-(-row_tiles // -(-row_tiles // plan.block)))


def fewest(block: int) -> int:
    """Return how many tiles of a block there are for the smallest likely number of rows. At least
    two, unless a block has one: a single tile would prefetch the whole panel by itself.
    """
    return max(int(block * MATMUL.likely[0]), min(block, 2))


def single_tile(work: Workload, columns: int) -> Plan:
    """Return the plan with all rows in a single tile with this many columns."""
    return Plan(work.rows, columns, split_evenly(work.depth, LONGEST_SUM), 1, rows_first=False)


def candidates(work: Workload, machine: Microarchitecture, bits: int) -> list[Plan]:
    """Return the plans worth trying, the one estimated fastest first."""
    ranked = tiles.ranked(work.rows, work.columns, machine, bits)
    others = tiles.alternatives(ranked, lambda tile: tile.columns, lambda tile: tile.rows)
    considered = dict.fromkeys([*ranked[: MATMUL.tiles], *others])
    own, *rest = _by_cost(work, considered, machine, bits)
    # For each feature, the best plan that differs in it; then all others by estimate.
    kinds = [
        lambda plan: plan.columns != own.columns,
        lambda plan: (
            (plan.columns, plan.rows) == (own.columns, own.rows)
            and plan.rows_first != own.rows_first
        ),
        lambda plan: plan == replace(own, block=plan.block),
        lambda plan: plan == replace(own, depth=plan.depth),
        lambda plan: plan.columns == own.columns and plan.rows != own.rows,
    ]
    unlike = [next(filter(kind, rest), own) for kind in kinds]
    return list(dict.fromkeys([own, *unlike, *rest[: MATMUL.runners_up]]))


def _by_cost(
    work: Workload, considered: Iterable[tiles.Tile], machine: Microarchitecture, bits: int
) -> list[Plan]:
    """Return the plans with some tiles, the one estimated fastest first."""
    plans = [plan for tile in considered for plan in _plans(work, tile, machine, bits)]

    def cost(plan: Plan) -> float:
        return _on_all_cores(work, plan, machine, bits)

    return sorted(dict.fromkeys(plans), key=cost)


def _on_all_cores(work: Workload, plan: Plan, machine: Microarchitecture, bits: int) -> float:
    counts = machine.core_counts(MATMUL.cores)
    return sum(n * nanoseconds(work, plan, machine, bits, n) for n in counts)


def _plans(
    work: Workload, tile: tiles.Tile, machine: Microarchitecture, bits: int
) -> Iterator[Plan]:
    weights = work.batch * work.depth * work.columns * bits // 8
    row_tiles = -(-work.rows // tile.rows)
    panels = work.batch * -(-work.columns // tile.columns)
    counts = {*MATMUL.blocks, *(-(-tasks // panels) for tasks in MATMUL.tasks)}
    # The most rows of the left-hand side that fit in L2.
    nearby = machine.working_set // (tile.rows * work.depth * bits // 8)
    counts.add(-(-row_tiles // max(nearby, 1)))
    if not work.packed:  # the right-hand side is copied as a whole for each block
        counts = {min(counts, key=lambda count: abs(count * panels - MATMUL.tasks[0]))}
    for block in {-(-row_tiles // min(count, row_tiles)) for count in counts}:
        longest = longest_sum(work.depth)
        parts = MATMUL.nearby_panels if machine.keeps(weights) else MATMUL.panels
        sizes = [int(machine.l1_bytes * part) // (tile.columns * bits // 8) for part in parts]
        # A single tile of rows reads the panel in one stream.
        limits = {min(longest, size) if block > 1 else longest for size in sizes}
        for depth in {split_evenly(work.depth, limit) for limit in limits}:
            for rows_first in (False, True)[: 1 + work.packed]:
                yield Plan(tile.rows, tile.columns, depth, block, rows_first)


def nanoseconds(
    work: Workload, plan: Plan, machine: Microarchitecture, bits: int, cores: int
) -> float:
    """Estimate the time of a plan on a number of cores, which is the time of the busiest core."""
    loops = _Loops(work, plan, machine, bits, cores)
    time = loops.multiplying() + loops.reading_right()
    time += loops.spilling()
    time += loops.adding_sums()
    time += loops.reading_left()
    time += loops.fetching_left_of_others()
    time += loops.writing_by_columns()
    return time + loops.forks * CORE.fork


class _Loops:
    """The loops of a plan, and how long the busiest core takes for each part, in nanoseconds.

    Attributes
    ----------
    blocks, panels
        How many blocks of rows and panels of columns there are; a task is one of each.
    left, right, result
        The bytes of the operands and the result.
    forks
        Whether several threads share the tasks.
    cores
        How many do.
    steps
        How many times a core adds an outer product to a tile.
    """

    def __init__(
        self, work: Workload, plan: Plan, machine: Microarchitecture, bits: int, cores: int
    ) -> None:
        self.work, self.plan, self.machine, self.bits = work, plan, machine, bits
        self.element = bits // 8
        row_tiles = -(-work.rows // plan.rows)
        self.blocks = -(-row_tiles // plan.block)
        self.panels = -(-work.columns // plan.columns)
        self.left = work.batch * self.element * work.rows * work.depth
        self.right = work.batch * self.element * work.depth * self.panels * plan.columns
        self.result = work.batch * self.element * work.rows * work.columns
        tasks = work.batch * self.blocks * self.panels
        multiply_adds = float(work.batch * work.rows * work.depth * work.columns)
        moved = self.left + self.right + self.result
        self.forks = tasks > 1 and machine.worth_threads(multiply_adds, moved)
        self.cores = min(cores, tasks) if self.forks else 1
        self.steps = -(-tasks // self.cores) * plan.block * work.depth

    def multiplying(self) -> float:
        """Multiply, with all operands in L1."""
        work, plan = self.work, self.plan
        tile = tiles.Tile(plan.rows, plan.columns)
        cycles = tiles.cycles(tile, self.machine, self.bits, work.columns)
        time = self.steps * cycles * MATMUL.cycle / CORE.clock
        if work.depth * work.row_stride * self.element % MATMUL.aliasing == 0:
            # Rows of the left-hand side evict each other from a set of L1.
            time *= 1 + max(plan.rows - MATMUL.ways, 0) * MATMUL.crowded
        return time

    def reading_right(self) -> float:
        """Read weights from memory, and from nearer caches for each block after the first."""
        plan, right = self.plan, self.right
        # By columns, each core reads its own weights; by rows, each core reads all of them.
        far = right if plan.rows_first and self.blocks > 1 else right / self.cores
        near = max(right * self.blocks / self.cores - far, 0) * (1 if plan.block > 1 else 2)
        far *= MATMUL.single_tile if plan.block == 1 and not self.machine.keeps(right) else 1
        # While they are prefetched, tiles with many rows compute.
        far *= min(1, MATMUL.hiding / (plan.block * plan.rows)) ** 2
        return far * MATMUL.far_byte + near * MATMUL.near_byte

    def spilling(self) -> float:
        """Read parts of a panel again that L1 does not hold."""
        plan = self.plan
        part = plan.depth * plan.columns * self.element
        if plan.block == 1 or part <= MATMUL.spills * self.machine.l1_bytes:
            return 0.0
        return self.steps * plan.columns * self.element * MATMUL.spilled_byte

    def adding_sums(self) -> float:
        """Add up the blocks of a reduction."""
        parts = -(-self.work.depth // self.plan.depth)
        return (parts - 1) * self.result / self.cores * MATMUL.sum_byte

    def reading_left(self) -> float:
        """Read the left-hand side again for each panel, if it is larger than L2."""
        if self.machine.distance(self.left // self._shares) <= 1:
            return 0.0
        return self.left * self.panels / self.cores * MATMUL.left_byte

    def fetching_left_of_others(self) -> float:
        """Fetch rows that other cores wrote."""
        shares = min(self._shares, self.cores)
        return (self.left / shares - self.left / self.cores) * MATMUL.foreign_byte

    def writing_by_columns(self) -> float:
        """Write a result larger than L2 whose rows are written in pieces."""
        by_columns = not self.plan.rows_first and self.panels > 1
        if not by_columns or self.result <= self.machine.l2_bytes:
            return 0.0
        return self.result / self.cores * MATMUL.result_byte

    @property
    def _shares(self) -> int:
        """Into how many parts the tasks divide the left-hand side."""
        return self.work.batch * (self.blocks if self.plan.rows_first else 1)
