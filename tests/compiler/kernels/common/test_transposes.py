"""Transposes by tiles, in functions with other work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from torch.nn import functional as F
from tvm import te

from tests.compiler.kernels.kernels import NATIVE, loops, random
from tests.compiler.programs import check, scheduled
from tvmify.compiler.kernels.common.schedule import Schedule
from tvmify.compiler.kernels.common.transposes import ACROSS, schedule_transposes
from tvmify.compiler.microarchitecture import Microarchitecture


@pytest.mark.parametrize("name", ["a", "if_then_else"])
def test_operands_may_have_any_name(name: str):
    a = te.placeholder((32, 48), name=name)
    sch = Schedule(te.create_prim_func([a, te.compute((48, 32), lambda i, j: a[j, i], "across")]))
    machine = Microarchitecture.of(NATIVE)
    assert schedule_transposes(sch, sch.get_sblock("across"), machine, 32 * 48)


@pytest.mark.parametrize("first", ["transposed", "other"])
def test_another_block_may_read_the_operand(first: str):
    a = te.placeholder((32, 48), name="a")
    transposed = te.compute((48, 32), lambda i, j: a[j, i] + 1, "transposed")
    other = te.compute((32,), lambda i: a[i, 0] * 2, "other")
    results = [transposed, other] if first == "transposed" else [other, transposed]
    sch = Schedule(te.create_prim_func([a, *results]))
    assert [x.name for x in results] == [
        sch.get(block).name_hint for block in sch.get_child_blocks(sch.get_sblock("root"))
    ]
    machine = Microarchitecture.of(NATIVE)
    assert schedule_transposes(sch, sch.get_sblock("transposed"), machine, 32 * 48)
    function = sch.mod["main"]
    assert any(ACROSS in (loop.annotations or {}) for loop in loops(function))
    read = sch.get(sch.get_sblock("other")).reads[0].source
    assert read.same_as(function.params[0]), "it reads the copy of a tile"
    x = random(32, 48)
    outs = [tvm.runtime.tensor(np.zeros([int(n) for n in y.shape], "float32")) for y in results]
    tvm.compile(tvm.IRModule({"main": function}), target=NATIVE)["main"](
        tvm.runtime.tensor(x), *outs
    )
    got = {y.name: out.numpy() for y, out in zip(results, outs, strict=True)}
    np.testing.assert_array_equal(got["transposed"], x.T + 1)
    np.testing.assert_array_equal(got["other"], x[:, 0] * 2)


def test_a_chain_between_transposes_that_cancel_is_one_loop_nest() -> None:
    """Groups of a convolution become images of their own, so its channels are split."""

    def program(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        planes = x.permute(0, 3, 1, 2).reshape(2, 64, 16, 16)
        return F.leaky_relu(planes + bias, 0.2).permute(0, 2, 3, 1).contiguous()

    args = torch.randn(1, 16, 16, 128), torch.randn(64, 1, 1)
    check(program, *args)
    module, rules = scheduled(program, *args)
    assert len(rules) == 1
    (function,) = (f for f in module.functions.values() if isinstance(f, tvm.tirx.PrimFunc))
    assert not function.body.block.alloc_buffers
