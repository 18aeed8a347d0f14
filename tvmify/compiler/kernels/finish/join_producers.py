"""Fuses the producers of reductions and scatters into them. FuseOps fuses a reduction with its
epilogue or with its prologue, not both. Ours take the epilogue, so that the squares of a variance
or norm, the products of a similarity, or the operands of an argmax would be written to memory by a
separate kernel and read once; so would be what the nodes of a graph send along its edges.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir import Expr, TensorLoad

from tvmify.compiler.kernels.common.attributes import READS_ONCE
from tvmify.compiler.kernels.common.inlining import calls_function, inline_cheap
from tvmify.compiler.kernels.common.loops import (
    blocks_of,
    element_count,
    is_injective,
    iterations,
    kinds,
)
from tvmify.compiler.kernels.common.rewriting import rewrite, substitute
from tvmify.compiler.kernels.common.schedule import Schedule
from tvmify.compiler.kernels.finish.handwritten import whole, with_statements
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.rewriting import join_calls


@compiler_pass
class JoinProducers:
    """Fuse producers into reductions and scatters; runs after all other fusion."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite ``main``."""
        return join_calls(ir_mod, _join)


def _join(first: tirx.PrimFunc, second: tirx.PrimFunc, place: int) -> tirx.PrimFunc | None:
    if not all(hasattr(p.ty, "shape") for f in (first, second) for p in f.params):
        return None
    if place in second.attrs.get(READS_ONCE, ()):
        single = _as_one_expression(first)
        joined = single and _in_one_function(single, second, place)
        return joined and _inlined(joined)
    if not _reads_each_once(second, place) or not _is_elementwise(first):
        return None
    return _in_one_function(first, second, place)


def _in_one_function(
    first: tirx.PrimFunc, second: tirx.PrimFunc, place: int
) -> tirx.PrimFunc | None:
    """Return a function with the loops of both, if it can know all sizes."""
    renamed = _with_symbols_of(first, second, place)
    if renamed is None or _hides_symbols(first, renamed, place):
        return None
    builder = relax.BlockBuilder()
    functions = [builder.add_func(f, name) for f, name in ((first, "first"), (renamed, "second"))]
    *inputs, elements = (_type(parameter) for parameter in first.params)
    *operands, result = (_type(parameter) for parameter in renamed.params)
    del operands[place]

    def parameters() -> list[relax.Var]:
        return [relax.Var(f"p{i}", ty) for i, ty in enumerate((*inputs, *operands))]

    given = parameters()
    with builder.function("joined", given, attrs={"Primitive": True}, private=True):
        with builder.dataflow():
            value = builder.emit(relax.call_tir(functions[0], given[: len(inputs)], elements))
            others = given[len(inputs) :]
            others.insert(place, value)
            output = builder.emit_output(relax.call_tir(functions[1], others, result))
        joined = builder.emit_func_output(output)
    given = parameters()
    with builder.function("main", given):  # functions that are not called are removed
        builder.emit_func_output(builder.emit(relax.Call(joined, given)))
    return relax.transform.FuseTIR()(builder.get())["joined"]


def _as_one_expression(function: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """Return a function as one loop nest, if it is one and calls no function such as exp, which
    only an element-wise kernel computes for whole vectors.
    """
    sch = Schedule(function)
    inline_cheap(sch)
    blocks = blocks_of(sch)
    is_one = len(blocks) == 1 and is_injective(sch, blocks[0])
    return sch.mod["main"] if is_one and not calls_function(sch, blocks[0]) else None


def _inlined(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Inline the first of two loop nests into the block of the second."""
    root = function.body.block
    nest, kernel = root.body.seq
    while isinstance(nest, tirx.For):
        nest = nest.body
    (written,), value = nest.block.writes, nest.block.body.value
    own = [axis.var for axis in nest.block.iter_vars]

    def computed(node: Expr) -> Expr | None:
        if not isinstance(node, TensorLoad) or not node.source.same_as(written.source):
            return None
        place = {
            axis: index.astype(str(axis.ty.dtype))
            for axis, index in zip(own, node.indices, strict=True)
        }
        return substitute(
            value, lambda part: place.get(part) if isinstance(part, tirx.Var) else None
        )

    def visit(stmt: tirx.Stmt) -> tirx.Stmt | None:
        if not isinstance(stmt, tirx.BufferStore):
            return None
        indices = [substitute(index, computed) for index in stmt.indices]
        return tirx.BufferStore(stmt.buffer, substitute(stmt.value, computed), indices)

    body = rewrite(kernel.block.body, visit)
    read = [region.source for region in (*kernel.block.reads, *nest.block.reads)]
    others = dict.fromkeys(tensor for tensor in read if not tensor.same_as(written.source))
    block = s_tir.SBlock(
        [], [*map(whole, others)], kernel.block.writes, kernel.block.name_hint, body
    )
    kernel = s_tir.SBlockRealize([], True, block)
    return with_statements(function, [kernel], unused=written.source)


def _with_symbols_of(
    first: tirx.PrimFunc, second: tirx.PrimFunc, place: int
) -> tirx.PrimFunc | None:
    """Return the second function in the symbols of the first.

    None if a size of the first is not a plain symbol: a function cannot infer one from ``n + 1``.
    """
    pairs = zip(second.params[place].ty.shape, first.params[-1].ty.shape, strict=True)
    symbols = {own: size for own, size in pairs if isinstance(own, tirx.Var)}
    if not symbols:
        return second
    if not all(isinstance(size, tirx.Var) for size in symbols.values()):
        return None
    return tvm_ffi.structural_map(second, [(tirx.Var, lambda v: symbols.get(v, v))])


def _hides_symbols(first: tirx.PrimFunc, second: tirx.PrimFunc, place: int) -> bool:
    """Whether only the tensor between two functions shows a size, as the result of a slice may."""
    others = [p for i, p in enumerate(second.params) if i != place]
    shown = {size for p in (*first.params[:-1], *others) for size in p.ty.shape}
    between = (*first.params[-1].ty.shape, *second.params[place].ty.shape)
    return any(isinstance(size, tirx.Var) and size not in shown for size in between)


def _type(parameter: tirx.Var) -> relax.TensorType:
    return relax.TensorType(parameter.ty.shape, str(parameter.ty.dtype))


def _reads_each_once(function: tirx.PrimFunc, place: int) -> bool:
    """Whether a parameter is read by one reduction alone, and each element by one of its steps."""
    sch, parameter = Schedule(function), function.params[place]
    readers = [
        block
        for block in blocks_of(sch)
        if any(read.source.same_as(parameter) for read in sch.get(block).reads)
    ]
    if len(readers) != 1 or "R" not in kinds(sch, readers[0]):
        return False
    # The last block of a sum may be shorter than the others.
    return iterations(sch, readers[0]) < 2 * element_count(parameter.ty.shape)


def _is_elementwise(function: tirx.PrimFunc) -> bool:
    """Whether each element is computed from those at its own place, as in a broadcast."""
    sch = Schedule(function)
    inline_cheap(sch)
    blocks = blocks_of(sch)
    if len(blocks) != 1 or not is_injective(sch, blocks[0]):
        return False
    block = sch.get(blocks[0])
    own = [variable.var for variable in block.iter_vars]
    return all(_is_at(own, [axis.min for axis in read.region]) for read in block.reads)


def _is_at(own: list[tirx.Var], index: list[Expr]) -> bool:
    """Whether an index consists of some of the given variables, in order, and numbers."""
    rest = iter(own)
    return all(
        isinstance(axis, tirx.IntImm) or any(axis.same_as(variable) for variable in rest)
        for axis in index
    )
