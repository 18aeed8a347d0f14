"""Keep the bools of a kernel's own buffers as int8, as TVM's passes expect."""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad

from tvmify.compiler.passes.compiler_pass import compiler_pass


@compiler_pass
class BoolsAsBytes:
    """Make the bool buffers that a function allocates int8; runs on flat buffers. Where every
    access is a vector, ``StorageRewrite`` changes the elements of a buffer to vectors, and bools to
    vectors of int8. A loaded value is then not a condition, and cannot be inverted as one.
    """

    def rewrite_kernel(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite one function."""
        narrow: dict[tirx.Var, tirx.Var] = {}

        def allocated(statement: tirx.AllocBuffer) -> tirx.AllocBuffer:
            buffer = statement.buffer
            if str(buffer.ty.dtype) == "bool":
                narrow[buffer] = buffer.with_dtype("int8")
            return statement

        tvm_ffi.structural_map(function.body, (tirx.AllocBuffer, allocated))
        if not narrow:
            return function
        rewrites = [
            (tirx.Var, lambda variable: narrow.get(variable, variable)),
            (TensorLoad, _loaded),
            (tirx.BufferStore, _stored),
        ]
        return function.with_body(tvm_ffi.structural_map(function.body, rewrites))


def _loaded(load: TensorLoad) -> Expr:
    """Convert a value loaded from a buffer whose type has changed to a condition."""
    dtype = str(load.ty.dtype)
    if not dtype.startswith("bool") or str(load.source.ty.dtype) == "bool":
        return load
    return tirx.Cast(dtype, tirx.BufferLoad(load.source, load.indices))


def _stored(store: tirx.BufferStore) -> tirx.BufferStore:
    dtype = str(store.value.ty.dtype)
    if not dtype.startswith("bool") or str(store.buffer.ty.dtype) == "bool":
        return store
    dtype = dtype.replace("bool", "int8")
    number = tirx.Select(store.value, tirx.const(1, dtype), tirx.const(0, dtype))
    return tirx.BufferStore(store.buffer, number, store.indices)
