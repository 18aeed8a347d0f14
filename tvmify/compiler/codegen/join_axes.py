"""Index tensors whose sizes vary by one place, where a loop over several axes divides it by them.

Such a loop reads ``x[p // (n * m), p % (n * m) // m, p % m]``. In the flat tensor that is element
``p``, but TVM's simplifier finds this for two axes only, so vectors would be loaded and stored lane
by lane, with divisions for each: ``exp`` of three axes took 40 times as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Expr, TensorLoad

from tvmify.compiler import sizes
from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class JoinAxes:
    """Write such indices as ``x[0, 0, p]``.

    Runs after passes that read from indices how much of a tensor is used, and before a simplifier
    that rewrites one of the quotients.
    """

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        if sizes.is_static(*sizes.of_parameters(function)):
            return function
        rewrites = [(tirx.BufferStore, _store), (TensorLoad, _load)]
        body = tvm_ffi.structural_map(function.body, rewrites)
        return function if body.same_as(function.body) else function.with_body(body)


def _store(store: tirx.BufferStore) -> tirx.BufferStore:
    indices = _joined(store.indices, store.buffer.shape)
    return store if indices is None else tirx.BufferStore(store.buffer, store.value, indices)


def _load(load: TensorLoad) -> Expr:
    shape = getattr(load.source, "shape", ())
    indices = _joined(load.indices, shape) if len(shape) == len(load.indices) else None
    return load if indices is None else tirx.BufferLoad(load.source, indices)


def _joined(indices: Sequence[Expr], shape: Sequence[Expr]) -> list[Expr] | None:
    """Return indices that lead to the same element, or None if they are no such quotients."""
    if sizes.is_static(*shape) or not isinstance(indices[-1], tirx.FloorMod):
        return None
    analyzer, place, size = sym.Analyzer(), indices[-1].a, shape[-1]
    if not analyzer.can_prove_equal(indices[-1].b, size):
        return None
    for axis in reversed(range(len(indices) - 1)):
        index = indices[axis]
        if not isinstance(index, tirx.FloorDiv) or not analyzer.can_prove_equal(index.b, size):
            return None
        if tvm_ffi.structural_equal(index.a, place):
            zeros = [tirx.const(0, str(place.ty.dtype))] * (len(indices) - axis - 1)
            return [*indices[:axis], *zeros, place]
        size = size * shape[axis]
        remains = isinstance(index.a, tirx.FloorMod) and tvm_ffi.structural_equal(index.a.a, place)
        if not remains or not analyzer.can_prove_equal(index.a.b, size):
            return None
    return None
