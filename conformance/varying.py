"""Random small programs, called with several sizes, through the decorator.

    python -m conformance.varying [--programs 2000] [--seed 0]

In each program, one size of its inputs varies from call to call; results have to equal eager's.
The counts go into docs/coverage.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from conformance.operations import OPERATIONS, Draw, largest
from conformance.operators import EAGER, Result
from conformance.programs import (
    MOST_STEPS,
    TOLERANCE,
    Input,
    Program,
    Together,
    explore,
    programs,
    publish,
)
from tvmify import tvmify
from tvmify.decorate.decorated import dispatcher_of
from tvmify.dispatch.outcome import Compiled

#: Sizes around the edges of vectors and tiles; programs are drawn with one of the first few.
SIZES = (3, 5, 8, 33, 2, 7, 9, 15, 16, 17)
#: Programs in one module. If one of them reads a size as a number, all are compiled for one size.
TOGETHER = 4
#: Calls of a module; the first two build a program each.
CALLS = 4
ANY_SIZE, ONE_SIZE = "one program for its sizes", "one program for each size"


@dataclasses.dataclass(frozen=True)
class Resized:
    """A program with one of its sizes replaced, in all inputs."""

    program: Program
    size: int

    def at(self, size: int) -> Program | None:
        """Return the program with another size; None if eager refuses it."""
        inputs = tuple(
            dataclasses.replace(
                given, shape=tuple(size if n == self.size else n for n in given.shape)
            )
            for given in self.program.inputs
        )
        try:
            scale = _scale(self.program, inputs)
        except (RuntimeError, IndexError):
            return None
        return dataclasses.replace(self.program, inputs=inputs, scale=scale)


def _scale(program: Program, inputs: Sequence[Input]) -> float:
    values = [given.tensor() for given in inputs]
    for step in program.steps:
        operands = [values[index] for index in step.operands]
        values.append(OPERATIONS[step.operation].function(*operands, *step.arguments))
    return max(map(largest, values))


@st.composite
def resized(draw: Draw) -> Resized:
    """Draw a program, and the size that varies."""
    program = draw(programs())
    sizes = {n for given in program.inputs for n in given.shape}
    return Resized(program, draw(st.sampled_from(sorted(sizes & set(SIZES)) or [0])))


MODULES = st.tuples(
    st.lists(resized(), min_size=TOGETHER, max_size=TOGETHER),
    st.lists(st.sampled_from(SIZES), min_size=CALLS, max_size=CALLS, unique=True),
)


def check(drawn: Sequence[Resized], sizes: Sequence[int]) -> Result:
    """Run programs with several sizes in eager and compiled, and compare; return where they ran.

    Raises
    ------
    AssertionError
        A result differs from eager's.
    """
    # Programs that eager refuses for some size are left out.
    by_program = [[one.at(size) for size in sizes] for one in drawn]
    kept = [[p for p in calls if p is not None] for calls in by_program if all(calls)]
    if not kept:
        return Result(EAGER, reason="eager takes none of the sizes")
    module: nn.Module = Together([calls[0] for calls in kept]).eval()
    fast: Any = tvmify(module, dynamic=None, cache=False, compare=False, progress=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for called in zip(*kept, strict=True):
            tensors = [given.tensor() for program in called for given in program.inputs]
            scale = max(program.scale for program in called)
            for got, want in zip(fast(*tensors), module(*tensors), strict=True):
                torch.testing.assert_close(
                    got, want, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True
                )
    return _where_it_ran(fast)


def _where_it_ran(fast: Any) -> Result:
    outcomes = list(dispatcher_of(fast).state.memory.values())
    last = outcomes[-1]
    if not isinstance(last, Compiled):
        assert last.reason is not None
        operators: list[str] = list(getattr(last.reason, "operators", ()))
        reason = getattr(last.reason, "detail", last.reason.reason)
        return Result(EAGER, type(last.reason).__name__, reason, operators)
    if last.executor.artifact.shapes is not None:
        return Result(ANY_SIZE)
    # Only the first program for one size has the reason why there is none for all sizes.
    reasons = [one.facts.one_shape for one in outcomes if isinstance(one, Compiled)]
    return Result(ONE_SIZE, reason="; ".join(why.reason for why in reasons if why is not None))


def main(arguments: list[str] | None = None) -> None:
    """Check programs, and count where they ran."""
    parser = argparse.ArgumentParser(description="Random programs of varying sizes.")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    what = (
        f"programs of up to {MOST_STEPS} steps, called with {CALLS} sizes, {TOGETHER} to a module"
    )
    counts = explore(MODULES, check, -(-given.programs // TOGETHER), given.seed)
    publish("varying", what, counts)


if __name__ == "__main__":
    main()
