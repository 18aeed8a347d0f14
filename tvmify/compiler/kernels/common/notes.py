"""Plans on blocks: a template notes how it was cut, and its rule reads that."""

from __future__ import annotations

from dataclasses import fields
from itertools import islice
from typing import Any, TypeVar, get_args, get_type_hints

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

_Plan = TypeVar("_Plan")


def noted(plan: Any) -> dict[str, list[int]]:
    """Return the ``attrs`` of a ``te.compute`` with this plan.

    It is a dataclass whose fields are numbers, truth values, or tuples of numbers.
    """
    numbers: list[int] = []
    for field in fields(plan):
        value = getattr(plan, field.name)
        numbers += value if isinstance(value, tuple) else [int(value)]
    return {_key(type(plan)): numbers}


def note_on(block: s_tir.SBlock, kind: type[_Plan]) -> _Plan | None:
    """Return the plan of this class that a block has; None if it has none."""
    given: Any = block.annotations.get(_key(kind))
    if given is None:
        return None
    types, numbers = get_type_hints(kind), map(int, given)
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        kind_of_field = types[field.name]
        parts = len(get_args(kind_of_field))
        values[field.name] = (
            tuple(islice(numbers, parts)) if parts else kind_of_field(next(numbers))
        )
    return kind(**values)


def take_note(sch: s_tir.Schedule, block: SBlockRV, kind: type[_Plan]) -> _Plan | None:
    """Return the same, and remove it: equal kernels may come of different plans."""
    plan = note_on(sch.get(block), kind)
    if plan is not None:
        sch.unannotate(block, _key(kind))
    return plan


def _key(kind: type) -> str:
    return f"tvmify.{kind.__name__.lower()}"
