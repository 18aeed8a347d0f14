"""Random small programs through the decorator.

    python -m conformance.programs [--programs 2000] [--seed 0]

Hypothesis draws programs of several steps on inputs of many shapes and strides; compiled code has
to give eager's results. Several programs form one module, which is compiled once. The counts go
into docs/coverage.md.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance.document import replace_section
from conformance.operations import OPERATIONS, Draw, Value, largest, result_of
from conformance.operators import Result, where_it_ran
from tvmify import tvmify

#: Programs in one module.
TOGETHER = 8
MOST_STEPS = 8
#: Relative to the largest magnitude in the program, since later steps carry rounding errors on.
TOLERANCE = 2e-5
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")


@dataclass(frozen=True)
class Input:
    """An input tensor of a program.

    Attributes
    ----------
    layout
        One of `LAYOUTS`: its layout in memory.
    seed
        The seed of its elements.
    special
        Whether some floats are NaN, infinite or a negative zero.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    seed: int
    special: bool

    def tensor(self) -> Tensor:
        """Make the tensor: floats are multiples of a quarter, so that short sums are exact."""
        shape = list(self.shape)
        if self.layout == "transposed":
            shape.reverse()
        elif self.layout == "sliced":
            shape = [2 * extent + 1 for extent in shape]
        elif self.layout == "expanded":
            shape[:1] = [1] * len(shape[:1])
        elements = torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(self.seed))
        if self.dtype.is_floating_point:
            tensor = (elements / 4).to(self.dtype)
            if self.special:
                for position, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0)):
                    tensor.view(-1)[position::7] = value
        else:
            tensor = elements > 0 if self.dtype is torch.bool else elements
        if self.layout == "transposed":
            return tensor.permute(tuple(reversed(range(tensor.dim()))))
        if self.layout == "sliced":
            return tensor[tuple(slice(1, None, 2) for _ in self.shape)]
        return tensor.expand(self.shape)


@dataclass(frozen=True)
class Step:
    """An operation on earlier values, which are numbered from the inputs on."""

    operation: str
    operands: tuple[int, ...]
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class Program:
    """Steps in order; its results are all values that no step reads.

    Attributes
    ----------
    scale
        The largest magnitude of all intermediate values.
    """

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    scale: float

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Compute the results."""
        values = list(tensors)
        for step in self.steps:
            operands = [values[index] for index in step.operands]
            values.append(OPERATIONS[step.operation].function(*operands, *step.arguments))
        read = {index for step in self.steps for index in step.operands}
        return [value for index, value in enumerate(values) if index not in read]


class Together(nn.Module):
    """Several programs as one module, so that one compilation covers them."""

    def __init__(self, programs: Sequence[Program]) -> None:
        super().__init__()
        self.programs = tuple(programs)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results of all programs; their tensors are concatenated."""
        rest = iter(tensors)
        results: list[Tensor] = []
        for program in self.programs:
            results += program.run([next(rest) for _ in program.inputs])
        return tuple(results)


_INPUTS = st.builds(
    Input,
    shape=st.lists(st.sampled_from([0, 1, 1, 2, 3, 3, 5, 8, 33]), max_size=4).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.int64, torch.bool]),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 999),
    special=st.sampled_from([False, False, True]),
)


@st.composite
def programs(draw: Draw) -> Program:
    """Draw a program of which eager accepts every step."""
    inputs = draw(st.lists(_INPUTS, min_size=1, max_size=3))
    values = [Value(given.tensor(), exact=True) for given in inputs]
    steps = draw_steps(draw, values, sorted(OPERATIONS), draw(st.integers(1, MOST_STEPS)))
    return Program(tuple(inputs), steps, max(largest(value.tensor) for value in values))


def draw_steps(
    draw: Draw, values: list[Value], names: Sequence[str], number: int, elements: int = 512
) -> tuple[Step, ...]:
    """Draw up to `number` steps, and append their results to the values.

    Parameters
    ----------
    names
        Names of the operations.
    elements
        The most elements of a result.
    """
    steps: list[Step] = []
    for _ in range(number):
        name = draw(st.sampled_from(names))
        operation = OPERATIONS[name]
        fitting = [[i for i, v in enumerate(values) if fits(v)] for fits in operation.fits]
        if not all(fitting):
            continue
        indices = tuple(draw(st.sampled_from(choice)) for choice in fitting)
        operands = [values[index] for index in indices]
        arguments = operation.arguments(draw, operands)
        value = result_of(operation, operands, arguments, elements)
        if value is not None:
            values.append(value)
            steps.append(Step(name, indices, arguments))
    return tuple(steps)


MODULES = st.tuples(st.lists(programs(), min_size=TOGETHER, max_size=TOGETHER), st.booleans())


def check(drawn: Sequence[Program], traced: bool) -> Result:
    """Run programs in eager and compiled, and compare; return where they ran.

    Parameters
    ----------
    drawn
        The programs; they form one module.
    traced
        Whether ``torch.jit.trace`` captures it instead of ``torch.export``.

    Raises
    ------
    AssertionError
        A result differs from eager's.
    """
    module = Together(drawn).eval()
    tensors = [given.tensor() for program in drawn for given in program.inputs]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject: Any = torch.jit.trace(module, tensors, check_trace=False) if traced else module
        accepted = module(*tensors)
        compiled = tvmify(subject, compare=False, cache=False, progress=False)
        for _ in ("compiled by this call", "from the memory cache"):
            actual = compiled(*tensors)
            scale = max(program.scale for program in drawn)
            for got, want in zip(actual, accepted, strict=True):
                torch.testing.assert_close(
                    got, want, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True
                )
    return where_it_ran(compiled)


def explore(
    modules: st.SearchStrategy[tuple[Sequence[Any], Any]],
    check: Callable[..., Result],
    number: int,
    seed: int | None,
) -> Counter[tuple[str, str]]:
    """Draw and check `number` modules; count their parts by where they ran and why.

    Parameters
    ----------
    modules
        Draws the arguments of `check`: the parts of a module, and how to compile it.
    seed
        None for the same modules every time.

    Raises
    ------
    AssertionError
        A result differs from eager's; a note has the smallest such module that was found.
    """
    counts: Counter[tuple[str, str]] = Counter()

    @settings(number, seed)
    @hypothesis.given(modules)
    def agrees(drawn: tuple[Sequence[Any], Any]) -> None:
        counts[counted(check(*drawn))] += len(drawn[0])

    (agrees if seed is None else hypothesis.seed(seed)(agrees))()
    return counts


def settings(examples: int, seed: int | None) -> hypothesis.settings:
    """Return the settings to draw `examples` modules; for `seed`, see `explore`."""
    return hypothesis.settings(
        max_examples=examples,
        derandomize=seed is None,
        database=None,
        deadline=None,
        # Shrinking a failure takes as long as half the programs: not in CI.
        phases=[Phase.generate] if seed is None else list(Phase),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def counted(result: Result) -> tuple[str, str]:
    """Return where a module ran, and why."""
    return result.outcome, f"{', '.join(result.operators)} {result.reason}".strip()


def publish(section: str, what: str, counts: Counter[tuple[str, str]]) -> None:
    """Write a table of where programs ran, and print it."""
    lines = [
        f"{sum(counts.values()):,} {what}: all agree with eager.",
        "",
        f"| where | why | {section} |",
        "| --- | --- | ---: |",
        *(f"| {where} | {why} | {count:,} |" for (where, why), count in counts.most_common()),
    ]
    replace_section(section, "\n".join(lines))
    print("\n".join(lines))


def main(arguments: list[str] | None = None) -> None:
    """Check programs, and count where they ran."""
    parser = argparse.ArgumentParser(description="Random programs through tvmify.")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    what = f"programs of up to {MOST_STEPS} steps, {TOGETHER} to a module"
    counts = explore(MODULES, check, -(-given.programs // TOGETHER), given.seed)
    publish("programs", what, counts)


if __name__ == "__main__":
    main()
