"""Handwritten kernels, and their element-wise epilogues.

No sequence of TVM's primitives leads from a tensor expression to such loops: a running softmax
between two products, steps over time. The code that lowers the operator emits them into one block,
the anchor, which has the name of the rule (see `emission.anchor`). The rule fuses the epilogue into
the stores of the kernel, so that results are not read again.
"""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.ir import Range, TensorRegion
from tvm.tirx import Stmt

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.inlining import total_work
from tvmify.compiler.kernels.common.loops import blocks_of
from tvmify.compiler.kernels.common.rewriting import rewrite
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.elementwise.rule import schedule_block
from tvmify.compiler.kernels.finish.chain import Chain
from tvmify.compiler.kernels.finish.epilogue import inline_producers
from tvmify.compiler.microarchitecture import Microarchitecture

#: Attribute of a function that may store a result twice. No result may then share memory with an
#: operand, which TVM allows if each element is read before it is overwritten: the second store
#: would read what the first has written.
STORES_TWICE = "tvmify.stores_twice"


class Handwritten(Rule):
    """Finds the anchor of its own name, whose loops are not changed.

    Parameters
    ----------
    name
        The name of the rule, and of its block.
    again
        Whether a kernel stores some results twice, with the same values.
    """

    def __init__(self, name: str, *, again: bool = False) -> None:
        self.name, self.anchors, self.again = name, frozenset({name}), again

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Fuse what follows the anchor into its stores, if that is one expression; otherwise
        schedule it.
        """
        function = sch.mod["main"]
        if len(blocks_of(sch)) > 1:
            work = total_work(sch)
            inline_producers(sch, self.name)  # of the chain: the kernel has none
            chain = Chain.of(sch, self.name)
            whole = chain and _storing(sch.mod["main"], chain)
            if whole is None:
                for block in blocks_of(sch):
                    if sch.get(block).name_hint != self.name:
                        schedule_block(sch, block, machine, work)
            function = whole or sch.mod["main"]
        return s_tir.Schedule(function.with_attr(STORES_TWICE, True) if self.again else function)


def _storing(function: tirx.PrimFunc, chain: Chain) -> tirx.PrimFunc | None:
    """Return a function of an anchor and a chain as one of the anchor alone.

    None if there are other nests, or if results are read at other places, or by the kernel itself,
    as the cell of an LSTM is.
    """
    root = function.body.block
    if len(root.body.seq) != 2:
        return None
    anchor, last = root.body.seq
    while isinstance(last, tirx.For):
        last = last.body
    (result,) = last.block.writes
    if not chain.is_in_place or _sizes(result.source) != _sizes(chain.stage):
        return None
    arguments = {tensor: tensor for tensor in chain.arguments}

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, tirx.BufferStore) or not stmt.buffer.same_as(chain.stage):
            return None
        value = chain.apply(stmt.value, stmt.indices, arguments)
        return tirx.BufferStore(result.source, value, stmt.indices)

    block, body = anchor.block, rewrite(anchor.block.body, visit)
    if chain.stage in tirx.analysis.undefined_vars(body, []):
        return None
    writes = [w for w in block.writes if not w.source.same_as(chain.stage)]
    block = s_tir.SBlock(
        block.iter_vars,
        [*block.reads, *map(_whole, arguments)],
        [*writes, _whole(result.source)],
        block.name_hint,
        body,
        alloc_buffers=block.alloc_buffers,
        annotations=block.annotations,
    )
    root = s_tir.SBlock(
        [],
        [],
        [],
        root.name_hint,
        s_tir.SBlockRealize([], True, block),
        alloc_buffers=[b for b in root.alloc_buffers if not b.same_as(chain.stage)],
        annotations=root.annotations,
    )
    return function.with_body(s_tir.SBlockRealize([], True, root))


def _sizes(tensor: tirx.Var) -> list[int | str]:
    return [*map(sizes.comparable, tensor.ty.shape)]


def _whole(tensor: tirx.Var) -> TensorRegion:
    return tirx.BufferRegion(tensor, [Range(0, size) for size in sizes.sizes_of(tensor.ty.shape)])
