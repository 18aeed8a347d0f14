"""Vectorized loops whose length is not a multiple of the vector."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx

from tests.compiler.kernels.kernels import NATIVE, loops
from tvmify.compiler.kernels.common.tails import split_tails


def _copy(length, lanes):
    a = te.placeholder((3, length), name="a")
    sch = s_tir.Schedule(te.create_prim_func([a, te.compute(a.shape, lambda *i: a(*i) + 1, "b")]))
    _, column = sch.get_loops(sch.get_sblock("b"))
    _, inner = sch.split(column, [None, lanes])
    sch.vectorize(inner)
    return split_tails(sch.mod["main"])


@pytest.mark.parametrize("length", [16, 17, 31, 37, 48, 5, 1])
def test_every_element_is_written_once(length):
    function = _copy(length, 16)
    x = np.random.default_rng(0).standard_normal((3, length)).astype("float32")
    out = tvm.runtime.tensor(np.zeros_like(x))
    tvm.compile(tvm.IRModule({"main": function}), target=NATIVE)["main"](tvm.runtime.tensor(x), out)
    np.testing.assert_array_equal(out.numpy(), x + 1)


@pytest.mark.parametrize(("length", "widths"), [(37, [16, 4]), (48, [16]), (31, [16, 8, 4, 2])])
def test_the_rest_is_made_of_smaller_vectors(length, widths):
    vectors = [x for x in loops(_copy(length, 16)) if x.kind == tirx.ForKind.VECTORIZED]
    assert [int(loop.extent) for loop in vectors] == widths
    assert not any(
        isinstance(loop.body, s_tir.SBlockRealize) and "<" in str(loop.body.predicate)
        for loop in vectors
    )
