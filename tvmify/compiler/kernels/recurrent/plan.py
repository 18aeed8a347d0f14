"""How a recurrence is cut: the rows and units of its tiles, and the alternatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from tvmify.compiler import sizes
from tvmify.compiler.costs import CORE, RECURRENT
from tvmify.compiler.kernels.common import choice, tiles
from tvmify.compiler.kernels.common.sums import longest_sum, split_evenly
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.sizes import Size

if TYPE_CHECKING:
    from tvmify.compiler.kernels.common.sample import Sample


@dataclass(frozen=True)
class Plan:
    """How a recurrence is cut up.

    Attributes
    ----------
    steps, batch, hidden, gates, dtype
        Extents of the problem. An LSTM has four gates, a GRU three, and a plain layer
        one: its new state.
    lanes, vectors
        The lanes of a vector, and the vectors of a tile of hidden units.
    rows
        How many rows of the batch are computed at once.
    depth
        How many elements of the previous state are summed in registers. The last block may be
        shorter.
    fork
        Whether threads share the tiles of a step.
    is_relu
        Whether a plain layer has ReLU instead of tanh.
    projected
        The elements of a state, if an LSTM projects its hidden units to fewer; else 0.
    """

    steps: Size
    batch: Size
    hidden: int
    gates: int
    dtype: str
    lanes: int
    vectors: int
    rows: int
    depth: int
    fork: bool
    is_relu: bool = False
    projected: int = 0

    @classmethod
    def of(
        cls,
        steps: Size,
        batch: Size,
        hidden: int,
        gates: int,
        dtype: str,
        machine: Microarchitecture,
        projected: int = 0,
    ) -> Plan:
        """Choose the tile that is estimated to be the fastest."""
        lanes = machine.lanes(bits_of(dtype))
        state = projected or hidden
        depth = split_evenly(state, longest_sum(state))
        plan = cls(steps, batch, hidden, gates, dtype, lanes, 1, 1, depth, fork=False)
        plan = replace(_ranked(plan, machine)[0], projected=projected)
        weights = gates * state * plan.padded
        fork = machine.worth_threads(sizes.hint(batch) * weights, weights * bits_of(dtype) // 8)
        return replace(plan, fork=fork)

    def __str__(self) -> str:
        sums = f" sums of {self.depth}" if self.depth < self.state else ""
        return f"{self.rows} rows {self.vectors} vectors{sums}{' shared' * self.fork}"

    @property
    def kind(self) -> str:
        """Which kernel it is for."""
        return {4: "lstm", 3: "gru", 1: "rnn"}[self.gates]

    def with_sizes(self, change: Callable[[Any], Any]) -> Plan:
        """Return it with another number of steps and another batch; `change` maps each to its new
        value.
        """
        return replace(self, steps=change(self.steps), batch=change(self.batch))

    @property
    def likely(self) -> Plan:
        """The same with a number for each size, for estimates."""
        return self.with_sizes(sizes.hint)

    @property
    def workload(self) -> str:
        """The workload: everything that affects the speed of candidates, so not the direction."""
        likely = self.likely
        state = f" to {self.projected}" if self.projected else ""
        return f"{self.kind} {likely.steps}x{likely.batch}x{self.hidden}{state} {self.dtype}"

    @property
    def work(self) -> float:
        """Multiply-adds, with an activation for each gate."""
        count = sizes.hint(self.steps) * sizes.hint(self.batch)
        own = self.gates * self.hidden * (self.state + CORE.function)
        return float(count * (own + self.hidden * self.projected))

    @property
    def state(self) -> int:
        """The elements of a state."""
        return self.projected or self.hidden

    @property
    def padded_state(self) -> int:
        """The same in whole tiles."""
        tile = self.state_tile if self.projected else self.tile
        return -(-self.state // tile) * tile

    @property
    def state_tile(self) -> int:
        """How many projected elements are computed together: sums enough to hide latencies."""
        most = max(1, RECURRENT.projected_sums // self.rows)
        return self.lanes * min(most, -(-self.state // self.lanes))

    @property
    def tile(self) -> int:
        """Hidden units that are computed together."""
        return self.lanes * self.vectors

    @property
    def padded(self) -> int:
        """Hidden units of whole tiles."""
        return -(-self.hidden // self.tile) * self.tile

    @property
    def blocks(self) -> Any:
        """How many blocks of `rows` rows the batch has."""
        return sizes.ceil_div(self.batch, self.rows)

    @property
    def few_rows(self) -> list[int]:
        """How many rows the last tile of an unknown batch may have."""
        return [*(1 << n for n in range((self.rows - 1).bit_length())), self.rows]

    @property
    def parts(self) -> Any:
        """How many tiles a step has, counting rows and units."""
        return self.padded // self.tile * self.blocks

    @property
    def packed_shape(self) -> tuple[int, int, int, int]:
        """Shape of the recurrent weights."""
        return (self.padded // self.tile, self.state, self.gates, self.tile)

    @property
    def projection_shape(self) -> tuple[int, int, int]:
        """Shape of the weights that project states."""
        return (self.padded_state // self.state_tile, self.hidden, self.state_tile)


def choose(own: Plan, machine: Microarchitecture, sample: Callable[[], Sample]) -> Plan:
    """Return the plan that was measured to be the fastest, else its own one.

    Parameters
    ----------
    sample
        Returns what candidates are measured by.
    """
    return choice.choose(own.workload, candidates(own, machine), sample)


def candidates(own: Plan, machine: Microarchitecture) -> list[Plan]:
    """Return the plans worth trying: its own one, then others by rows, vectors and threads."""
    ranked = _ranked(own, machine)
    others = tiles.alternatives(ranked, lambda plan: plan.vectors, lambda plan: plan.rows)
    this, *rest = (
        [replace(plan, fork=not plan.fork)] if plan.likely.parts > 1 else []
        for plan in (own, *others)
    )
    return [own, *this, *others, *chain(*rest)]


def _ranked(plan: Plan, machine: Microarchitecture) -> list[Plan]:
    """Order plans by how long their products take, that of the fastest tile first.

    Rows that are computed twice, and padded units, count like others. If sums leave too few
    registers for the weights of a step, LLVM spills (docs/measurements/registers.md).
    """
    bits = bits_of(plan.dtype)

    def tile(plan: Plan) -> tiles.Tile:
        return tiles.Tile(plan.rows, plan.gates * plan.tile)

    within = (
        replace(plan, rows=rows, vectors=vectors)
        for vectors in range(1, RECURRENT.most_gate_vectors + 1)
        for rows in range(1, min(sizes.hint(plan.batch), machine.accumulators) + 1)
        if vectors == 1 or (vectors - 1) * plan.lanes < plan.hidden
    )
    fitting = (
        plan
        for plan in within
        if tiles.leaves_register(tile(plan), machine, bits, tile(plan).columns)
    )

    def cycles(plan: Plan) -> float:
        return tiles.cycles(tile(plan), machine, bits, tile(plan).columns)

    def cost(plan: Plan) -> float:
        if sizes.is_static(plan.batch):
            return plan.parts * cycles(plan)
        return (plan.padded // plan.tile) * sum(
            (batch // plan.rows * cycles(plan) + cycles(replace(plan, rows=rows)) * (left > 0))
            / batch
            for batch in sizes.around(plan.batch)
            for left in [batch % plan.rows]
            for rows in [next(few for few in plan.few_rows if few >= left)]
        )

    return sorted(fitting, key=cost)
