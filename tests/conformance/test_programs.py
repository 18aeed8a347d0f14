"""Random small programs agree with eager; `make programs` draws many more."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.operations import OPERATIONS, Value, largest, result_of
from conformance.operators import BRIDGED, COMPILED
from conformance.programs import (
    LAYOUTS,
    MODULES,
    TOGETHER,
    Input,
    Program,
    Step,
    Together,
    check,
    explore,
)

PROGRAMS = 32


def test_random_programs_match_eager() -> None:
    counts = explore(MODULES, check, PROGRAMS // TOGETHER, seed=None)
    assert sum(counts.values()) >= PROGRAMS
    compiled = sum(n for (where, _), n in counts.items() if where in (COMPILED, BRIDGED))
    assert compiled >= 0.9 * sum(counts.values()), counts


def test_inputs_have_their_layout() -> None:
    tensors = {
        layout: Input((3, 4), torch.float32, layout, seed=0, special=True).tensor()
        for layout in LAYOUTS
    }
    assert {tensor.shape for tensor in tensors.values()} == {(3, 4)}
    assert all(tensor.isnan().any() and tensor.isinf().any() for tensor in tensors.values())
    strides = {layout: tensor.stride() for layout, tensor in tensors.items()}
    assert strides == {
        "contiguous": (4, 1),
        "transposed": (1, 3),
        "sliced": (18, 2),
        "expanded": (0, 1),
    }


def test_program_returns_unread_values() -> None:
    given = Input((2,), torch.int64, "contiguous", seed=1, special=False)
    steps = (Step("add", (0, 0), ()), Step("flip", (0,), ([0],)))
    program = Program((given,), steps, scale=32.0)
    x = given.tensor()
    doubled, flipped = Together([program])(x)
    assert torch.equal(doubled, 2 * x) and torch.equal(flipped, x.flip(0))
    assert check([program, program], traced=False).outcome == COMPILED


def test_failing_or_exploding_operation_is_not_a_step() -> None:
    exact, rounded = Value(torch.ones(2, 3), exact=True), Value(torch.ones(2, 3), exact=False)
    assert result_of(OPERATIONS["add"], [exact, Value(torch.ones(4), exact=True)], ()) is None
    assert result_of(OPERATIONS["mul_scalar"], [exact], (1e6,)) is None
    sums = result_of(OPERATIONS["sum"], [exact], ([], False))
    assert sums is not None and not sums.exact
    assert not OPERATIONS["lt"].fits[0](rounded)
    assert largest(torch.tensor([0.5, float("inf"), -3.0])) == 3.0


def test_every_operation_accepts_its_draws() -> None:
    tensors = (torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2).bool())
    values = [Value(tensor, exact=True) for tensor in tensors]
    taken = set()

    @settings(max_examples=20)
    @given(st.data())
    def draw_each(data: st.DataObject) -> None:
        for name, operation in OPERATIONS.items():
            operands = [next(v for v in values if fits(v)) for fits in operation.fits]
            arguments = operation.arguments(data.draw, operands)
            if result_of(operation, operands, arguments) is not None:
                taken.add(name)

    draw_each()
    assert taken == OPERATIONS.keys()
