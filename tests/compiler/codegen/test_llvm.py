"""Functions in LLVM IR."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.ir import Expr

from tests.compiler.kernels.kernels import NATIVE
from tvmify.compiler.codegen import llvm

X = tirx.Var("x", "float32x4")


def test_types_have_the_names_of_llvm():
    names = {
        "float32": "float",
        "float64x8": "<8 x double>",
        "float16x16": "<16 x half>",
        "int8x4": "<4 x i8>",
        "uint64": "i64",
        "bool": "i1",
        "boolx8": "<8 x i1>",
    }
    assert {dtype: llvm.type_of(dtype) for dtype in names} == names


def test_bound_values_are_computed_once():
    bound = tirx.Var("t", "float32x4")
    result = tirx.Let(bound, X * X, bound * bound + bound)
    text = llvm.define("f", [X], result)
    assert text == (
        "define linkonce_odr <4 x float> @f(<4 x float> %p0) alwaysinline {\n"
        "entry:\n"
        "  %v1 = fmul <4 x float> %p0, %p0\n"
        "  %v2 = fmul <4 x float> %v1, %v1\n"
        "  %v3 = fadd <4 x float> %v2, %v1\n"
        "  ret <4 x float> %v3\n"
        "}\n"
    )


def test_unknown_expressions_are_refused():
    with pytest.raises(NotImplementedError, match="Ramp"):
        llvm.define("f", [], tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), 4))
    with pytest.raises(NotImplementedError, match=r"tirx\.tanh"):
        llvm.define("f", [X], tirx.tanh(X))


def test_functions_of_llvm_are_declared_once():
    definitions = llvm.Definitions()
    for name in ("f", "g"):
        definitions.call("float32x4", name, [X], llvm.define(name, [X], tirx.floor(X)))
    function = tirx.PrimFunc([], tirx.Evaluate(tirx.const(0, "int32")))
    text = str(definitions.added_to(function, function.body).body.value.value)
    assert len(re.findall(r"declare <4 x float> @llvm\.floor\.v4f32", text)) == 1
    assert llvm.Definitions().added_to(function, function.body).same_as(function)


def _computed(dtype: str, describe: object, *values: list[float]) -> list[float]:
    """Compute a function of scalars for the elements of arrays."""
    arrays = [np.array(column, dtype) for column in values]
    parameters = [tirx.Var(f"x{i}", dtype) for i in range(len(arrays))]
    result: Expr = describe(*parameters)  # type: ignore[operator]
    kind = str(result.ty.dtype)
    definitions, text = llvm.Definitions(), llvm.define("f", parameters, result)
    places = [te.placeholder(array.shape, dtype) for array in arrays]
    out = te.compute(
        arrays[0].shape, lambda i: definitions.call(kind, "f", [place[i] for place in places], text)
    )
    function = te.create_prim_func([*places, out]).with_attr("global_symbol", "main")
    whole = definitions.added_to(function, function.body)
    got = tvm.runtime.tensor(np.zeros(arrays[0].shape, kind))
    tvm.compile(tvm.IRModule({"main": whole}), target=NATIVE)["main"](
        *(tvm.runtime.tensor(array) for array in arrays), got
    )
    return got.numpy().tolist()


def test_floats():
    nan, inf = float("nan"), float("inf")
    x, y = [1.5, -2.5, nan, inf], [2.0, 2.0, 1.0, 1.0]

    def describe(a, b):
        smaller = tirx.Select(a < b, a - b, a / b)
        return tirx.if_then_else(
            tirx.isnan(a), tirx.const(7.0, "float32"), smaller + tirx.Max(a, b)
        )

    assert _computed("float32", describe, x, y) == [1.5, -2.5, 7.0, inf]
    assert _computed("float32", tirx.Mod, x[:2], y[:2]) == [1.5, -0.5]
    # Written by the bits of a float64; 0.1 has more digits than float32.
    third = float(np.float32(0.1))
    assert _computed("float32", lambda a: a * tirx.const(0.1, "float32"), [1.0]) == [third]


def test_integers():
    x = [5, -5, 2**31 - 1, -(2**31)]
    assert _computed("int32", lambda a: a >> 1, x) == [2, -3, 2**30 - 1, -(2**30)]
    assert _computed("uint32", lambda a: a >> 31, [1, 2**31]) == [0, 1]
    assert _computed("int32", lambda a: tirx.Cast("float64", a), x) == [float(i) for i in x]
    assert _computed("int32", lambda a: tirx.Cast("int64", a) * a.astype("int64"), [-3]) == [9]
    assert _computed("uint8", lambda a: tirx.Cast("int32", a), [255]) == [255]
    assert _computed("float32", lambda a: tirx.Cast("int32", a), [-2.7]) == [-2]
    assert _computed("int32", lambda a: tirx.reinterpret("float32", a), [0x3F800000]) == [1.0]
    assert _computed("int32", lambda a: (a & 6) | (a ^ 1), [5]) == [4]
