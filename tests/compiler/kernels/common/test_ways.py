"""Functions that can be scheduled in several ways, and the candidates offered for measurement."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.s_tir import ScheduleError

from tests.compiler.kernels.kernels import NATIVE, build, check, has_parallel_loop, random
from tests.processes import run_python
from tvmify.compiler.kernels.common import ways
from tvmify.compiler.kernels.common.choice import Choices, choosing
from tvmify.compiler.kernels.common.rule import RuleFailure
from tvmify.compiler.kernels.common.ways import Way
from tvmify.compiler.kernels.reduction.rule import Reduction
from tvmify.compiler.tune.samples import lower_sample

op = relax.op


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


#: A function for each rule, with no length that is a multiple of the vector, and its result.
KERNELS = {
    "reduction": (lambda builder, x: op.nn.softmax(x, -1), lambda x: softmax(x, -1), (90, 403)),
    "column reduction": (
        lambda builder, x: op.sum(x, 1),
        lambda x: x.sum(1),
        (20, 70, 250),
    ),
    "elementwise": (
        lambda builder, x: op.multiply(
            op.strided_slice(x, [1], [3], [901]), relax.const(np.float32(2))
        ),
        lambda x: 2 * x[:, 3:901],
        (64, 1000),
    ),
}


def asked(describe, *shapes):
    """Return the candidates and a sample for each workload of a function."""
    with choosing(Choices(is_collecting=True)) as choices:
        build(describe, [random(*shape) for shape in shapes])
    return choices


@pytest.mark.parametrize("rule", KERNELS)
def test_every_alternative_is_right(rule):
    describe, expected, shape = KERNELS[rule]
    choices = asked(describe, shape)
    ((workload, names),) = choices.candidates.items()
    assert workload.startswith(f"{rule} {'x'.join(map(str, expected(random(*shape)).shape))} ")
    assert len(names) > 1
    bodies = []
    for name in names:
        with choosing(Choices(measured={workload: name})):
            built = check(describe, expected, [random(*shape)], rule=rule)
        assert has_parallel_loop(built.kernel()) == name.endswith("threads")
        bodies.append(built.kernel().script())
    assert len(set(bodies)) == len(bodies)
    # The rule's own comes first.
    assert build(describe, [random(*shape)]).kernel().script() == bodies[0]


def test_only_distinct_alternatives_are_candidates():
    # No row is longer than a vector; threads pay for many rows, but not for a few.
    choices = asked(lambda builder, x: op.sum(x, [1]), (2000, 16))
    (names,) = choices.candidates.values()
    assert names == [str(Way(4)), str(Way(4, threads=True))]
    assert not asked(lambda builder, x: op.add(x, x), (4000, 1024)).candidates


def test_workload_ignores_names():
    def named(name):
        def describe(builder, x):
            scaled = builder.emit(op.multiply(x, relax.const(np.float32(3))), name)
            return builder.emit(op.nn.softmax(scaled, -1), name + "2")

        return describe

    first, second = (list(asked(named(name), (90, 203)).candidates) for name in ("a", "other"))
    assert first == second
    assert first != list(asked(named("a"), (90, 204)).candidates)


def test_workload_is_stable_across_processes():
    program = """
        from tests.compiler.kernels.common.test_ways import KERNELS, asked
        describe, _, shape = KERNELS["reduction"]
        print(*asked(describe, shape).candidates)
    """
    there = run_python(program)
    describe, _, shape = KERNELS["reduction"]
    (here,) = asked(describe, shape).candidates
    assert here == there.stdout.strip()


@pytest.mark.parametrize(
    ("describe", "shapes"),
    [
        pytest.param(lambda builder, x: op.nn.softmax(x, -1), [(4, 64)], id="short"),
        pytest.param(
            lambda builder, x: op.multiply(
                op.zeros((90, 203), "float32"), op.ones((1,), "float32")
            ),
            [(4,)],
            id="without inputs",
        ),
        pytest.param(
            lambda builder, x, i: op.take(x, op.astype(i, "int64"), 0, mode="fast"),
            [(400, 203), (300,)],
            id="looked up",
        ),
        pytest.param(
            lambda builder, x, y: op.floor_divide(op.astype(x, "int32"), op.astype(y, "int32")),
            [(90, 203)] * 2,
            id="divided",
        ),
    ],
)
def test_trivial_or_unmeasurable_choice_is_skipped(describe, shapes):
    assert not asked(describe, *shapes).candidates


def test_functions_of_several_results_are_measured():
    choices = asked(lambda builder, x: op.split(x, 2, 1), (64, 1000))
    (sample,) = choices.samples.values()
    (function,) = (
        f for _, f in sample.ir_mod().functions_items() if f.attrs and "s_tir" in f.attrs
    )
    assert len(function.params) == 3
    assert lower_sample(sample, NATIVE, Choices())().library
    shape = sample.types[-1].shape
    assert shape is not None
    assert [int(size) for size in shape] == [64, 500]


def test_workloads_are_named_only_when_measuring(monkeypatch):
    named = []
    monkeypatch.setattr(ways, "_workload", lambda *about: named.append(about) or "work")
    describe, _, shape = KERNELS["reduction"]
    build(describe, [random(*shape)])
    assert not named
    asked(describe, shape)
    assert named


def test_way_that_tvm_refuses_is_no_candidate(monkeypatch: pytest.MonkeyPatch):
    _fail_in(monkeypatch, Way(8), ScheduleError("no such loop"))
    describe, _, shape = KERNELS["reduction"]
    (names,) = asked(describe, shape).candidates.values()
    assert not any(name.startswith("8 wide") for name in names)
    assert any(name.startswith("4 wide") for name in names)


def test_bug_in_a_way_is_a_failure_of_its_rule(monkeypatch: pytest.MonkeyPatch):
    _fail_in(monkeypatch, Way(8), KeyError("a bug"))
    describe, _, shape = KERNELS["reduction"]
    with pytest.raises(RuleFailure, match="reduction failed: KeyError: 'a bug'"):
        asked(describe, shape)
    monkeypatch.delenv("TVMIFY_STRICT_COMPILER")
    with choosing(Choices(is_collecting=True)):
        built = build(describe, [random(*shape)])
    assert any("reduction failed: KeyError" in rule for rule in built.rules), built.rules


def _fail_in(monkeypatch: pytest.MonkeyPatch, failing: Way, error: Exception) -> None:
    """Let the rule for reductions raise an error in one of its ways."""
    nest = Reduction.nest

    def fails(self, sch, machine, way):
        if way.vectors == failing.vectors:
            raise error
        return nest(self, sch, machine, way)

    monkeypatch.setattr(Reduction, "nest", fails)
