"""Rules read back what templates note on blocks."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import s_tir, te, tirx

from tvmify.compiler.kernels.common.axes import named
from tvmify.compiler.kernels.common.notes import note_on, noted, take_note


@dataclass(frozen=True)
class Plan:
    rows: int
    place: tuple[int, int]
    shared: bool


@dataclass(frozen=True)
class Other:
    rows: int


PLAN = Plan(3, (5, 7), True)


def _noted(plan: Plan) -> s_tir.Schedule:
    x = te.placeholder((4,), name="x")
    attributes = noted(plan) | named("x")
    y = te.compute((4,), lambda i: x[i] + 1.0, name="y", attrs=attributes)
    function = te.create_prim_func([x, y])
    assert isinstance(function, tirx.PrimFunc)
    return s_tir.Schedule(function)


def test_a_plan_is_read_back():
    sch = _noted(PLAN)
    found = note_on(sch.get(sch.get_sblock("y")), Plan)
    assert found == PLAN
    assert found.shared is True


def test_a_plan_of_another_class_is_none():
    sch = _noted(PLAN)
    assert note_on(sch.get(sch.get_sblock("y")), Other) is None


def test_taking_a_plan_removes_its_note():
    sch = _noted(PLAN)
    block = sch.get_sblock("y")
    assert take_note(sch, block, Plan) == PLAN
    assert take_note(sch, block, Plan) is None
