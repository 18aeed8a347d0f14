"""The element-wise epilogue of a handwritten kernel, as an expression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.ir import Expr, TensorLoad

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.inlining import nests_too_deep
from tvmify.compiler.kernels.common.loops import (
    blocks_of,
    exact_iterations,
    is_injective,
    is_output,
)
from tvmify.compiler.kernels.common.rewriting import collect, substitute


@dataclass(frozen=True)
class Chain:
    """The computation on each result of a kernel before it is stored, at the same place.

    Attributes
    ----------
    place
        Variables for the place of a result, one for each axis.
    stage
        The tensor of the function that holds the kernel's own result.
    value
        The expression, which reads `stage` and arguments of the function.
    """

    place: Sequence[tirx.Var]
    stage: tirx.Var
    value: Expr

    @classmethod
    def of(cls, sch: s_tir.Schedule, anchor: str) -> Chain | None:
        """Inline all that follows the block `anchor`, and return it.

        None if it is more than one expression, or if the kernel's own result is also an output, or
        is broadcast.
        """
        names = [sch.get(block).name_hint for block in blocks_of(sch)]
        results = [region.source for region in sch.get(sch.get_sblock(anchor)).writes]
        return cls.behind(sch, results, names[names.index(anchor) + 1 :])

    @classmethod
    def behind(
        cls, sch: s_tir.Schedule, results: Sequence[tirx.Var], following: Sequence[str]
    ) -> Chain | None:
        """Do the same for the results of a kernel, and the names of the blocks that follow it."""
        if any(result in sch.mod["main"].params for result in results):
            return None
        count = exact_iterations(sch, sch.get_sblock(following[0]))
        for name in following[:-1]:
            block = sch.get_sblock(name)
            if not is_injective(sch, block) or is_output(sch, block) or nests_too_deep(sch, block):
                return None
            sch.compute_inline(block)
        block = sch.get_sblock(following[-1])
        last = sch.get(block)
        store, place = last.body, [variable.var for variable in last.iter_vars]
        same = _is_at(place, store.indices) and sizes.same(count, exact_iterations(sch, block))
        read = [load.source for load in collect(store.value, TensorLoad) if load.source in results]
        if not same or not read or any(source != read[0] for source in read):
            return None
        if not is_injective(sch, block):
            return None
        return cls(place, read[0], store.value)

    @property
    def arguments(self) -> list[tirx.Var]:
        """The tensors that it reads besides the kernel's result."""
        return [
            load.source for load in collect(self.value, TensorLoad) if load.source != self.stage
        ]

    @property
    def is_in_place(self) -> bool:
        """Whether each element of `stage` is read at its place."""
        read = [load for load in collect(self.value, TensorLoad) if load.source == self.stage]
        return all(_is_at(self.place, load.indices) for load in read)

    def apply(
        self, result: Expr, place: Sequence[Expr], arguments: Mapping[tirx.Var, tirx.Var]
    ) -> Expr:
        """Return the expression for a result at a place.

        Parameters
        ----------
        arguments
            The buffers here for the parameters of the function that the chain comes from.
        """
        known = dict(zip(self.place, place, strict=True))

        def visit(node: Expr) -> Expr | None:
            if isinstance(node, TensorLoad):
                if node.source.same_as(self.stage):
                    return result
                indices = [substitute(index, visit) for index in node.indices]
                return tirx.BufferLoad(arguments[node.source], indices)
            return known.get(node) if isinstance(node, tirx.Var) else None

        return substitute(self.value, visit)


def _is_at(place: Sequence[tirx.Var], indices: Sequence[Expr]) -> bool:
    return len(indices) == len(place) and all(map(Expr.same_as, indices, place))
