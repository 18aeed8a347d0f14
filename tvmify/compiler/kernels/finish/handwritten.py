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
from tvmify.compiler.kernels.common.loops import blocks_of, is_injective
from tvmify.compiler.kernels.common.rewriting import rewrite
from tvmify.compiler.kernels.common.rule import Rule
from tvmify.compiler.kernels.common.schedule import Schedule
from tvmify.compiler.kernels.elementwise.rule import schedule_block
from tvmify.compiler.kernels.finish.chain import Chain
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
            function = _with_epilogue(sch, self.name, machine)
        return Schedule(function.with_attr(STORES_TWICE, True) if self.again else function)


def _with_epilogue(sch: s_tir.Schedule, name: str, machine: Microarchitecture) -> tirx.PrimFunc:
    """Return a function with the blocks around its anchor fused into it, or scheduled.

    The anchor is left out for now: if sizes are symbolic, TVM cannot prove that a block without
    axes writes everything that others read, and then inlines nothing.
    """
    function = sch.mod["main"]
    anchor, others = _apart(function, name)
    rest = Schedule(with_statements(function, others))
    names = [sch.get(block).name_hint for block in blocks_of(sch)]
    place = names.index(name)
    for before in names[:place]:  # which the chain reads, and the kernel does not
        if is_injective(rest, rest.get_sblock(before)):
            rest.compute_inline(rest.get_sblock(before))
    results = [region.source for region in anchor.block.writes]
    chain = Chain.behind(rest, results, names[place + 1 :])
    whole = chain and _storing(rest.mod["main"], anchor.block, chain)
    if whole is not None:
        return whole
    work = total_work(sch)
    for block in blocks_of(rest):
        schedule_block(rest, block, machine, work)
    scheduled = rest.mod["main"]
    return with_statements(scheduled, [anchor, *_statements(scheduled)])


def _apart(function: tirx.PrimFunc, name: str) -> tuple[s_tir.SBlockRealize, list[Stmt]]:
    """Return the anchor of a function, and its other statements."""
    statements = _statements(function)
    (place,) = (
        place
        for place, statement in enumerate(statements)
        if isinstance(statement, s_tir.SBlockRealize) and statement.block.name_hint == name
    )
    return statements.pop(place), statements


def _statements(function: tirx.PrimFunc) -> list[Stmt]:
    body = function.body.block.body
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def with_statements(
    function: tirx.PrimFunc, statements: list[Stmt], unused: tirx.Var | None = None
) -> tirx.PrimFunc:
    """Return a function with other statements, and without a tensor that they do not use."""
    root = function.body.block
    root = s_tir.SBlock(
        [],
        [],
        [],
        root.name_hint,
        statements[0] if len(statements) == 1 else tirx.SeqStmt(statements),
        alloc_buffers=[b for b in root.alloc_buffers if not b.same_as(unused)],
        annotations=root.annotations,
    )
    return function.with_body(s_tir.SBlockRealize([], True, root))


def _storing(rest: tirx.PrimFunc, block: s_tir.SBlock, chain: Chain) -> tirx.PrimFunc | None:
    """Return a function whose anchor stores the results of a chain instead of its own.

    None if there are other nests, or if results are read at other places, or by the kernel itself,
    as the cell of an LSTM is.

    Parameters
    ----------
    rest
        The function without the anchor.
    """
    statements = _statements(rest)
    if len(statements) != 1:
        return None
    (last,) = statements
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

    body = rewrite(block.body, visit)
    if chain.stage in tirx.analysis.undefined_vars(body, []):
        return None
    writes = [w for w in block.writes if not w.source.same_as(chain.stage)]
    block = s_tir.SBlock(
        block.iter_vars,
        [*block.reads, *map(whole, arguments)],
        [*writes, whole(result.source)],
        block.name_hint,
        body,
        alloc_buffers=block.alloc_buffers,
        annotations=block.annotations,
    )
    return with_statements(rest, [s_tir.SBlockRealize([], True, block)], unused=chain.stage)


def _sizes(tensor: tirx.Var) -> list[int | str]:
    return [*map(sizes.comparable, tensor.ty.shape)]


def whole(tensor: tirx.Var) -> TensorRegion:
    """Return the region of all elements, as the block of a kernel reads and writes it."""
    return tirx.BufferRegion(tensor, [Range(0, size) for size in sizes.sizes_of(tensor.ty.shape)])
