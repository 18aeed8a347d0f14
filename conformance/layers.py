"""Random layers through the decorator, with randomly chosen candidate kernels.

    python -m conformance.layers [--layers 1000] [--seed 0]

Hypothesis draws layers that the schedule rules handle, of many sizes, each followed by some steps
of `conformance.programs`. A seed replaces the measurements of ``tune="quick"``: every candidate has
to give eager's results, not only the heuristic's choice. The counts go into docs/coverage.md.
"""

from __future__ import annotations

import argparse
import copy
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from conformance.layer_kinds import KINDS
from conformance.operations import Draw, Value, largest
from conformance.operators import Result, where_it_ran
from conformance.programs import LAYOUTS, Input, Program, draw_steps, explore, publish
from tests.tolerances import SLACK, TIMES_EAGER
from tvmify import tvmify
from tvmify.decorate.decorated import dispatcher_of
from tvmify.dispatch import work
from tvmify.dispatch.outcome import Compiled
from tvmify.runtime.native import cpu_features

#: Layers in one module.
TOGETHER = 4
MOST_STEPS = 4
#: The most elements of a step's result.
ELEMENTS = 1 << 16
#: Operations that may follow a layer; those that fuse with its kernel, or read its result, are
#: listed more often.
FOLLOWING = (
    *("add", "add", "mul", "sub", "maximum", "add_scalar", "mul_scalar", "clamp", "halves") * 2,
    *("relu", "gelu", "silu", "tanh", "sigmoid", "root", "square", "abs", "quotient") * 2,
    *("cat", "cat", "stack", "slice", "permute", "reshape", "flatten", "unsqueeze", "select"),
    *("pad", "flip", "roll", "expand", "repeat_interleave", "sum", "mean", "amax", "softmax"),
    *("cumsum", "gram", "matmul"),
)
#: Dtypes of inputs that are not floats; see `conformance.layer_kinds.Shape`.
DTYPES = {"index": torch.int64, "mask": torch.bool}
_AVX2 = ("avx", "avx2", "f16c", "fma")


@dataclass(frozen=True)
class Build:
    """How layers are compiled.

    Attributes
    ----------
    narrow
        Whether to use only AVX2, whatever the processor has.
    seed
        The seed of the choice among candidates.
    """

    dtype: torch.dtype
    accuracy: str
    narrow: bool
    seed: int

    def options(self) -> dict[str, Any]:
        """Return the options of the decorator."""
        options: dict[str, Any] = {"compare": False, "cache": False, "progress": False}
        options |= {"accuracy": self.accuracy, "tune": "quick"}
        if self.narrow and set(_AVX2) <= set(cpu_features()):
            options["target"] = {"kind": "llvm", "mattr": [f"+{name}" for name in _AVX2]}
        return options


@dataclass(frozen=True)
class Chance:
    """Stands in for measurements: any candidate may be the fastest."""

    seed: int

    def best(self, workload: str, candidates: Sequence[str]) -> str:
        """Return a candidate, always the same one for a workload."""
        return random.Random(f"{self.seed} {workload}").choice(candidates)


class Layer(nn.Module):
    """A layer, followed by a program on its first input, another tensor and its results.

    Attributes
    ----------
    inputs
        The inputs of the layer, then the other tensor.
    """

    def __init__(self, layer: nn.Module, inputs: tuple[Input, ...], after: Program) -> None:
        super().__init__()
        self.layer = layer
        self.inputs = inputs
        self.after = after

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return all values that no step reads, without the inputs."""
        results = pytree.tree_leaves(self.layer(*tensors[:-1]))
        left = self.after.run([tensors[0], tensors[-1], *results])
        return tuple(value for value in left if not any(value is tensor for tensor in tensors))

    def extra_repr(self) -> str:
        """Return the description for a failure."""
        return f"inputs={self.inputs}\nafter={self.after.steps}"


class Together(nn.Module):
    """Several layers as one module, so that one compilation covers them."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.counts = [len(layer.inputs) for layer in layers]

    def forward(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        """Return the results of each layer; their tensors are concatenated."""
        rest = iter(tensors)
        pairs = zip(self.layers, self.counts, strict=True)
        return tuple(layer(*(next(rest) for _ in range(count))) for layer, count in pairs)


@st.composite
def layers(draw: Draw, dtype: torch.dtype) -> Layer:
    """Draw a layer and what follows it."""
    layer, shapes = draw(st.sampled_from(KINDS))(draw)
    layer = _randomized(layer, draw(st.integers(0, 999))).to(dtype).eval()
    inputs = [_input(draw, shape, dtype) for shape in shapes]
    tensors = [given.tensor() for given in inputs]
    with torch.no_grad():
        try:
            results: list[Tensor] = pytree.tree_leaves(layer(*tensors))
        except NotImplementedError:  # such as average pools of volumes in bfloat16
            hypothesis.reject()
        own = draw(st.sampled_from(results)).shape
        shape = [draw(st.sampled_from([1, size, size])) for size in own]
        kept = draw(st.integers(0, len(shape))) if draw(st.booleans()) else 0
        inputs.append(_input(draw, ("x", *shape[kept:]), dtype))
        # No value is exact: a program in float64 is compared with one that rounds.
        given = [tensors[0], inputs[-1].tensor(), *results]
        values = [Value(tensor, exact=False) for tensor in given]
        steps = draw_steps(draw, values, FOLLOWING, draw(st.integers(0, MOST_STEPS)), ELEMENTS)
    scale = max(largest(value.tensor) for value in values)
    return Layer(layer, tuple(inputs), Program((), steps, scale))


BUILDS = st.builds(
    Build,
    dtype=st.sampled_from([*[torch.float32] * 6, torch.bfloat16, torch.float64]),
    accuracy=st.sampled_from(["default", "default", "strict"]),
    narrow=st.sampled_from([False, False, True]),
    seed=st.integers(0, 2**32),
)
MODULES = BUILDS.flatmap(
    lambda build: st.tuples(
        st.lists(layers(build.dtype), min_size=TOGETHER, max_size=TOGETHER), st.just(build)
    )
)


def _input(draw: Draw, shape: tuple[Any, ...], dtype: torch.dtype) -> Input:
    kind, *sizes = shape
    layout = draw(st.sampled_from(["contiguous", "contiguous", *LAYOUTS]))
    seed = draw(st.integers(0, 999))
    return Input(tuple(sizes), DTYPES.get(kind, dtype), layout, seed, special=False)


def _randomized(layer: nn.Module, seed: int) -> nn.Module:
    """Fill all weights with random values that keep results about as large as inputs."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [*layer.parameters(), *layer.buffers()]
    for tensor in filter(torch.is_floating_point, tensors):
        deviation = (tensor.numel() / max(1, len(tensor))) ** -0.5 if tensor.dim() > 1 else 0.3
        values = torch.randn(tensor.shape, generator=generator) * deviation
        # Tensors with one axis are biases, or the scales and variances of norms.
        tensor.data.copy_(values if tensor.dim() > 1 else 1 + values.clamp(-0.9, 0.9))
    return layer


def check(drawn: Sequence[Layer], build: Build) -> Result:
    """Run layers in eager and compiled, and compare; return where they ran.

    Raises
    ------
    AssertionError
        A result differs from eager's, or a schedule rule failed.
    """
    module = Together(drawn).eval()
    tensors = [given.tensor() for layer in drawn for given in layer.inputs]
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    measurements = mock.patch.object(work, "Measurements", lambda *_: Chance(build.seed))
    with torch.no_grad(), measurements, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accepted, exact = module(*tensors), copy.deepcopy(module).double()(*wide)
        compiled: Any = tvmify(module, **build.options())
        for _ in ("compiled by this call", "from the memory cache"):
            for layer, *results in zip(drawn, compiled(*tensors), accepted, exact, strict=True):
                for got, want, reference in zip(*results, strict=True):
                    _compare(got, want, reference, layer.after.scale)
    for outcome in dispatcher_of(compiled).state.memory.values():
        if not isinstance(outcome, Compiled):
            continue
        rules = outcome.executor.artifact.report["kernels"]
        failed = {name: rule for name, rule in rules.items() if "failed" in rule}
        assert not failed, failed
    return where_it_ran(compiled)


def _compare(got: Tensor, want: Tensor, exact: Tensor, scale: float) -> None:
    """Compare a result with float64; eager's error and the largest value set the tolerance."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if not want.is_floating_point():
        assert torch.equal(got, want)
        return
    if not want.numel():
        return
    assert torch.equal(got.isfinite(), want.isfinite())
    ours, eager = (
        (result.double() - exact).nan_to_num(0, 0, 0).abs().max().item() for result in (got, want)
    )
    allowed = TIMES_EAGER[want.dtype] * eager + SLACK[want.dtype] * scale
    assert ours <= allowed, f"error {ours:.3g}, allowed {allowed:.3g} (eager {eager:.3g})"


def main(arguments: list[str] | None = None) -> None:
    """Check layers, and count where they ran."""
    parser = argparse.ArgumentParser(description="Random layers through tvmify.")
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    what = f"layers with up to {MOST_STEPS} steps after each, {TOGETHER} to a module"
    counts = explore(MODULES, check, -(-given.layers // TOGETHER), given.seed)
    publish("layers", what, counts)


if __name__ == "__main__":
    main()
