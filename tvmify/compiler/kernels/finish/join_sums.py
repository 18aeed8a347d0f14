"""Fuses the producers of reductions into them. FuseOps fuses a reduction with its epilogue or with
its prologue, not both. Ours take the epilogue, so that the squares of a variance or norm, the
products of a similarity, or the operands of an argmax would be written to memory by a separate
kernel and read once.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Expr

from tvmify.compiler.kernels.common.inlining import inline_cheap
from tvmify.compiler.kernels.common.loops import (
    blocks_of,
    element_count,
    is_injective,
    iterations,
    kinds,
)
from tvmify.compiler.kernels.common.schedule import Schedule
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.passes.rewriting import join_calls


@compiler_pass
class JoinSums:
    """Fuse producers into reductions; runs after all other fusion."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite ``main``."""
        return join_calls(ir_mod, _join)


def _join(first: tirx.PrimFunc, second: tirx.PrimFunc, place: int) -> tirx.PrimFunc | None:
    if not all(hasattr(p.ty, "shape") for f in (first, second) for p in f.params):
        return None
    if not _reads_each_once(second, place) or not _is_elementwise(first):
        return None
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
