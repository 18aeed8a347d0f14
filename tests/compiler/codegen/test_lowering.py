"""TVM's passes on several functions at a time."""

from __future__ import annotations

import warnings

import pytest
import tvm
from tvm import relax, tirx
from tvm.s_tir.pipeline import default_s_tir_pipeline

from tests.compiler.kernels.kernels import NATIVE, build, lowered, random
from tvmify.compiler.codegen import hoist_conditions, lowering
from tvmify.compiler.codegen.call_functions import CallFunctions
from tvmify.compiler.codegen.shuffle_loads import ShuffleLoads
from tvmify.compiler.codegen.sums_on_stack import SumsOnStack
from tvmify.compiler.kernels.common.prefetch import FETCHES


@pytest.fixture
def scheduled() -> tvm.IRModule:
    """Kernels of two programs."""
    functions = {}
    for rows in (64, 5):

        def describe(builder, left, right):
            return relax.op.nn.gelu(relax.op.matmul(left, right))

        built = build(describe, [random(rows, 32)], [random(32, 50, seed=1)], NATIVE)
        for variable, function in built.ir_mod.functions_items():
            if isinstance(function, tirx.PrimFunc):
                name = f"{variable.name_hint}_{rows}"
                # TVM narrows the indices of all functions.
                function = function.without_attr(FETCHES)
                functions[name] = function.with_attr("global_symbol", name)
    return tvm.IRModule(functions)


def test_matches_lowering_of_tvm(scheduled: tvm.IRModule, monkeypatch: pytest.MonkeyPatch):
    # TVM moves conditions out of branches, too.
    monkeypatch.setattr(hoist_conditions, "_decides_in_branch", lambda body: False)
    with NATIVE:
        to_packed, finalize, _ = default_s_tir_pipeline()
        bound = tirx.transform.BindTarget(NATIVE.with_host(NATIVE))(scheduled)
        own = tvm.transform.Sequential([ShuffleLoads(), SumsOnStack(), CallFunctions()])
        expected = tirx.transform.SkipAssert()(finalize()(own(to_packed(bound))))
    assert len(expected.functions_items()) == len(scheduled.functions_items()) > 2
    tvm.ir.assert_structural_equal(lowered(scheduled, NATIVE), expected)


def test_thread_warnings_are_contained(scheduled: tvm.IRModule, monkeypatch: pytest.MonkeyPatch):
    said = []

    @tvm.transform.module_pass(opt_level=0)
    class Warns:
        def transform_module(self, ir_mod: tvm.IRModule, _: object) -> tvm.IRModule:
            warnings.warn("deprecated somewhere below", DeprecationWarning, stacklevel=1)
            said.append(ir_mod)
            return ir_mod

    monkeypatch.setattr(lowering, "ShuffleLoads", Warns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered(scheduled, NATIVE)
    assert len(said) == len(scheduled.functions_items())


def test_indices_are_wide_where_weights_are_fetched_ahead():
    def of_loops(columns):
        def describe(builder, left, right):
            return relax.op.matmul(left, right)

        built = build(describe, [random(64, 128)], [random(128, columns, seed=1)])
        lines = built.lowered()["main"].script().splitlines()
        heads = [line for line in lines if line.lstrip().startswith("for ")]
        return built.kernel().script().count("T.prefetch("), ["T.int64(" in head for head in heads]

    prefetches, wide = of_loops(1)
    assert prefetches == 0
    assert wide
    assert not any(wide)
    prefetches, wide = of_loops(512)
    assert prefetches > 0
    assert any(wide)
