"""The tasks of a parallel loop differ by at most one iteration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.compiler.programs import check, prepare_tvm

prepare_tvm()

import tvm  # noqa: E402
from tvm import sym, tirx  # noqa: E402
from tvm.script import tirx as T  # noqa: E402

from tvmify.compiler.codegen.share_evenly import (  # noqa: E402
    ShareEvenly,
)

TASKS = 16


def rewritten(count: int) -> tirx.For:
    @T.prim_func(s_tir=True)
    def function(x: T.Buffer((4096,), "float32")):  # type: ignore[valid-type]
        for i in T.parallel(count):
            x[i] = T.float32(0)

    loop = ShareEvenly()(tvm.IRModule({"f": function}))["f"].body
    while not isinstance(loop, tirx.For):
        loop = loop.block.body if hasattr(loop, "block") else loop.body
    return loop


def iterations(loop: tirx.For, begin: int, end: int) -> Iterator[int]:
    """The iterations that a task with these slots runs."""
    if not isinstance(loop.body, tirx.IfThenElse):
        yield from range(begin, end)
        return
    bind = loop.body.then_case.seq[0]
    for slot in range(begin, end):
        analyzer = sym.Analyzer()
        analyzer.bind(loop.loop_var, tirx.const(slot, str(loop.loop_var.ty.dtype)))
        if bool(analyzer.simplify(loop.body.condition)):
            yield int(analyzer.simplify(bind.value))


@pytest.mark.parametrize("count", [2, 3, 8, 15, 16, 17, 31, 48, 50, 100, 1023, 1030])
def test_tasks_have_as_many_iterations_each(count: int):
    loop = rewritten(count)
    slots = int(loop.extent)
    assert slots % TASKS == 0 or count > 1000
    share = -(-slots // TASKS)  # as TVM divides a loop
    bounds = [(min(i * share, slots), min((i + 1) * share, slots)) for i in range(TASKS)]
    tasks = [list(iterations(loop, *bound)) for bound in bounds]
    assert [i for task in tasks for i in task] == list(range(count))
    sizes = [len(task) for task in tasks]
    assert max(sizes) - min(sizes) <= (1 if count < 1000 else share)
    # The same holds for two threads, which begin with half of the tasks each.
    assert abs(sum(sizes[:8]) - sum(sizes[8:])) <= (1 if count < 1000 else share)


def test_symbolic_iterations_are_shared():
    """Each slot has a range of iterations, computed without a division by a symbol."""
    symbol, i = tirx.Var("n", "int64"), tirx.Var("i", "int64")
    zero = tirx.const(0, "int64")
    body = tirx.Evaluate(tirx.call_extern("int32", "work", i))
    parallel = tirx.For(i, zero, symbol * 2, tirx.ForKind.PARALLEL, body)
    function = tirx.PrimFunc([symbol], parallel)
    bind, loop = ShareEvenly()(tvm.IRModule({"f": function}))["f"].body.seq
    bound = sym.Analyzer().simplify(bind.value)
    assert sym.Analyzer().can_prove_equal(bound, symbol * 2)
    slots = int(loop.extent)
    assert slots % TASKS == 0
    length, own = loop.body.seq
    for count in (2, 8, 16, 17, 34, 100, 1023, 5000):
        found: list[list[int]] = []
        for slot in range(slots):
            analyzer = sym.Analyzer()
            analyzer.bind(bind.var, tirx.const(count, "int64"))
            analyzer.bind(loop.loop_var, tirx.const(slot, "int64"))
            analyzer.bind(own.loop_var, zero)
            first = int(analyzer.simplify(own.body.seq[0].value))
            found.append([*range(first, first + int(analyzer.simplify(length.value)))])
        assert [i for part in found for i in part] == list(range(count))
        share = slots // TASKS
        tasks = [sum(map(len, found[i : i + share])) for i in range(0, slots, share)]
        assert max(tasks) - min(tasks) <= 1


@pytest.mark.parametrize("rows", [7, 50, 331])
def test_all_iterations_run(rows: int):
    x, y = torch.randn(rows, 33, 65), torch.randn(rows, 65, 40)
    check(lambda x, y: (x @ y).softmax(-1).sum(1), x, y)
