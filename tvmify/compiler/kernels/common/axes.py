"""Names for the axes of a block: a template assigns them, and rules look axes up by name. With
positions, an additional axis in a template would make every rule use the wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.ir import Expr
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.rewriting import rewrite, rewrite_body, with_block_parts

#: Annotation of a block: the names of its iteration variables, in order.
_AXES = "tvmify.axes"
#: The names of the rows of every tile of sums, and of its columns, which are vector lanes.
ROW, LANE = "row", "lane"
#: The names of the axes of an NHWC image, in order.
PIXEL = "image", "y", "x", "channel"


class AxisError(LookupError):
    """A block has no axis of a name, or the wrong number of names."""


@dataclass(frozen=True)
class Axes:
    """The iteration variables of a block, by name.

    Attributes
    ----------
    block
        The name of the block, for errors.
    variables
        The iteration variables, in order.
    """

    block: str
    variables: dict[str, tirx.IterVar]

    @classmethod
    def of(cls, block: s_tir.SBlock) -> Axes:
        """Read the names that `named` wrote.

        Raises
        ------
        AxisError
            The number of names differs from the number of axes.
        """
        given: Iterable[object] = block.annotations.get(_AXES, ())  # type: ignore[assignment]
        names = [str(name) for name in given]
        if len(set(names)) != len(block.iter_vars):
            raise AxisError(
                f"block {block.name_hint!r} has {len(block.iter_vars)} axes, and its template "
                f"names {len(set(names))} ({', '.join(names)}): name all of them in its `attrs`"
            )
        return cls(block.name_hint, dict(zip(names, block.iter_vars, strict=True)))

    def __contains__(self, name: str) -> bool:
        return name in self.variables

    def __getitem__(self, name: str) -> tirx.IterVar:
        """Return the variable of a name.

        Raises
        ------
        AxisError
            There is none.
        """
        if name not in self.variables:
            known = ", ".join(self.variables)
            raise AxisError(f"block {self.block!r} has no axis {name!r}, but: {known}")
        return self.variables[name]

    def extent(self, name: str) -> int:
        """Return how many iterations an axis has; an estimate where it has symbols."""
        return sizes.hint(self[name].dom.extent)

    def extents(self, *names: str) -> tuple[int, ...]:
        """Return how many iterations each of several axes has."""
        return tuple(self.extent(name) for name in names)

    def position(self, name: str) -> int:
        """Return which iteration variable of the block an axis is."""
        variable = self[name]
        return next(i for i, one in enumerate(self.variables.values()) if one is variable)


def own_loops(sch: s_tir.Schedule, block: SBlockRV) -> dict[str, LoopRV]:
    """Return the loops of a block by the names of its axes, before any is split or moved.

    These are its innermost ones; outer ones may belong to a block that it was computed at, with
    ``preserve_unit_loops``.
    """
    names = Axes.of(sch.get(block)).variables
    return dict(zip(names, sch.get_loops(block)[-len(names) :], strict=True))


def loops_along(sch: s_tir.Schedule, block: SBlockRV, *names: str) -> list[LoopRV]:
    """Return those of `own_loops` that run along the axes of these names, in the order of these.

    Raises
    ------
    AxisError
        The block has no axis of one of the names.
    """
    axes, loops = Axes.of(sch.get(block)), list(own_loops(sch, block).values())
    return [loops[axes.position(name)] for name in names]


def name_as(sch: s_tir.Schedule, block: SBlockRV, other: SBlockRV) -> None:
    """Give the axes of one block the names of another one's, which has as many."""
    sch.annotate(block, _AXES, list(Axes.of(sch.get(other)).variables))


def named(*names: str) -> dict[str, list[str]]:
    """Return the ``attrs`` of a ``te.compute`` with these axes, those to reduce over last."""
    return {_AXES: list(names)}


def value_along(realize: s_tir.SBlockRealize, name: str) -> Expr | None:
    """Return the value of an axis where a block runs; None if it has no such axis.

    The block may set the initial value of a reduction: it has the names of that, without the axes
    to reduce over, which are the last.
    """
    given: Iterable[object] = realize.block.annotations.get(_AXES, ())  # type: ignore[assignment]
    return dict(zip(map(str, given), realize.iter_values, strict=False)).get(name)


def forget_axes(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Remove the names from a scheduled function, since equal kernels may name axes differently."""

    def visit(stmt: tirx.Stmt) -> tirx.Stmt | None:
        if not isinstance(stmt, s_tir.SBlockRealize) or _AXES not in stmt.block.annotations:
            return None
        kept = {key: value for key, value in stmt.block.annotations.items() if key != _AXES}
        block = with_block_parts(stmt.block, rewrite(stmt.block.body, visit), kept)
        return s_tir.SBlockRealize(stmt.iter_values, stmt.predicate, block)

    return rewrite_body(function, visit)
