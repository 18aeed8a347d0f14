"""The computations of a contender's process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch

from benchmarks.contenders import runs_in_eager
from benchmarks.worker import burst, largest_error
from tvmify import tvmify


def test_the_error_is_of_the_worst_output() -> None:
    outputs = (torch.tensor([1.0, 2.0]), [torch.tensor([10.0]).numpy()])
    references = [torch.tensor([1.0, 2.0]).double(), torch.tensor([8.0]).double()]
    assert largest_error(outputs, references) == 0.25


def test_outputs_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="number and shapes"):
        largest_error(torch.ones(2), [torch.ones(1, 2)])


def test_burst_has_a_minimum_number_of_calls() -> None:
    calls: Iterator[int] = count()
    assert burst(lambda: next(calls), seconds=0.0)["calls"] == 5
    assert next(calls) > 5  # some went before, to warm up


def test_why_a_module_runs_in_eager_is_found_in_its_explanation() -> None:
    def depends_on_values(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x

    fast = tvmify(depends_on_values)
    with pytest.warns(UserWarning):
        fast(torch.ones(2))
    assert "runs in eager PyTorch: " in runs_in_eager(fast.explain())
