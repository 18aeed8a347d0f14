"""Random small programs of varying sizes agree with eager; `make programs` draws more."""

from __future__ import annotations

import torch

from conformance.programs import Input, Program, Step, explore
from conformance.varying import ANY_SIZE, MODULES, TOGETHER, Resized, check

PROGRAMS = 20


def test_random_programs_of_varying_sizes_match_eager() -> None:
    counts = explore(MODULES, check, PROGRAMS // TOGETHER, seed=None)
    assert sum(counts.values()) >= PROGRAMS
    served = sum(n for (where, _), n in counts.items() if where == ANY_SIZE)
    assert served >= 0.7 * sum(counts.values()), counts


def test_all_tensors_of_a_size_are_resized_if_eager_accepts_them() -> None:
    def resized(*steps: Step) -> Resized:
        inputs = (
            Input((3, 4), torch.float32, "contiguous", seed=0, special=False),
            Input((4, 3), torch.float32, "contiguous", seed=1, special=False),
        )
        return Resized(Program(inputs, steps, scale=1.0), 3)

    found = resized(Step("matmul", (0, 1), ())).at(7)
    assert found is not None
    assert [given.shape for given in found.inputs] == [(7, 4), (4, 7)]
    assert resized(Step("add", (0, 1), ())).at(7) is None
