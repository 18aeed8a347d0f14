"""The contract of all schedule rules, on the smallest program that each accepts.

A rule without an example fails. For other processors and for GPUs, nothing runs here.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F
from tvm import s_tir, tirx

from benchmarks.structure import digest
from tests.compiler import programs
from tests.compiler.gpu_programs import Kernels, gpu
from tests.compiler.kernels.kernels import AVX2, AVX512, NATIVE, NEON
from tests.compiler.programs import recorded
from tvmify.compiler import pipeline, sizes
from tvmify.compiler.cuda.rules import RULES as GPU_RULES
from tvmify.compiler.frontend.decompositions import Decomposed, decompose
from tvmify.compiler.frontend.importer import import_program
from tvmify.compiler.kernels import RULES
from tvmify.compiler.kernels.common.choice import Choices, choosing
from tvmify.compiler.kernels.common.rule import Outcome, Rule, RuleFailure, apply_in_turn
from tvmify.compiler.microarchitecture import Microarchitecture

TARGETS = {"avx2": AVX2, "avx512": AVX512, "neon": NEON}
GPUS = {arch: pipeline.tvm_target(gpu(arch)) for arch in ("sm_80", "sm_90a")}
Functions = dict[tvm.ir.GlobalVar, tirx.PrimFunc]


@dataclass(frozen=True)
class Example:
    """A layer that a rule accepts, of any size.

    Attributes
    ----------
    layer
        Takes the size, and returns a module or function, and its arguments.
    tile
        A size without a tail: the tile along the axis that the rule splits.
    least
        The smallest size at which the rule accepts the layer.
    any_size
        Whether the rule is for images of any height and width; `test_any_size`, next to such rules,
        compares their results with eager.
    """

    layer: Callable[[int], tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]
    tile: int = 16
    least: int = 1
    any_size: bool = False

    @property
    def sizes(self) -> list[int]:
        """A size with only a tail, one without a tail, and one with tiles and a tail."""
        return [1, self.tile, 37]

    def program(self, *sizes: int) -> tuple[nn.Module, tuple[Any, ...]]:
        """Return one program with a layer of each size."""
        torch.manual_seed(0)
        layers = [self.layer(size) for size in sizes]
        return Several([layer for layer, _ in layers]), ([args for _, args in layers],)

    def exported(self) -> ExportedProgram:
        """Record a program with one layer."""
        module, args = self.program(self.tile)
        shapes = ([({2: Dim.AUTO, 3: Dim.AUTO},)],) if self.any_size else None
        return recorded(module, args, dynamic_shapes=shapes)


class Several(nn.Module):
    """Several independent layers, each with its own arguments."""

    def __init__(self, layers: list[Callable[..., Any]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(programs.as_module(layer) for layer in layers)

    def forward(self, args: list[tuple[torch.Tensor, ...]]) -> list[Any]:
        """Return the result of each."""
        return [layer(*own) for layer, own in zip(self.layers, args, strict=True)]


def _convolution(size: int, *args: Any, **options: Any) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """An image that is `size` pixels wide."""
    layer = nn.Conv2d(*args, **options)
    return layer, (torch.randn(1, layer.in_channels, 6, size),)


def _winograd(size: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """An image large enough for Winograd, wider by `size` than a multiple of its tiles."""
    return nn.Conv2d(64, 64, 3, padding=1), (torch.randn(1, 64, 28, 24 + size),)


def _expanded(size: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    narrow = nn.Conv2d(96, 96, 3, padding=1, groups=96)
    layer = nn.Sequential(nn.Conv2d(16, 96, 1), nn.ReLU6(), narrow)
    return layer, (torch.randn(1, 16, 6, size),)


def _pooled(size: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    layer = nn.Sequential(nn.Conv2d(3, 16, 1), nn.MaxPool2d(3, 2, 1))
    return layer, (torch.randn(1, 3, 6, size),)


def _attention(size: int) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    return F.scaled_dot_product_attention, tuple(torch.randn(3, 1, 2, size, 16))


def _recurrent(kind: type[nn.RNNBase], size: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    return kind(4, size), (torch.randn(3, 2, 4),)


class _Gated(nn.Module):
    """Two products of the same rows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(24, size, bias=False), nn.Linear(24, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute a gated product as in Llama."""
        return F.silu(self.gate(x)) * self.up(x)


def _of(function: Callable[..., Any], *shape: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return function, (torch.randn(shape),)


def _written(size: int) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    places = torch.randint(size, (3,))
    return lambda x, i, y: torch.index_put(x, (i,), y), (
        torch.randn(size, 5),
        places,
        torch.randn(3, 5),
    )


EXAMPLES = {
    "empty": Example(lambda size: _of(torch.relu, size, 0)),
    "attention": Example(_attention),
    "expanded depthwise": Example(_expanded, tile=8),
    "lstm": Example(functools.partial(_recurrent, nn.LSTM)),
    "gru": Example(functools.partial(_recurrent, nn.GRU)),
    "rnn": Example(functools.partial(_recurrent, nn.RNN)),
    "cumsum": Example(lambda size: _of(lambda x: torch.cumsum(x, 0), 3, size)),
    "cumprod": Example(lambda size: _of(lambda x: torch.cumprod(x, 0), 3, size)),
    "streamed product": Example(
        lambda size: (lambda x, y: x @ y, (torch.randn(2, 9), torch.randn(9, size))), least=16
    ),
    "scatter": Example(_written),
    "bounds check": Example(lambda size: (nn.Embedding(size, 5), (torch.randint(size, (size,)),))),
    "conv2d": Example(lambda size: _convolution(size, 3, 16, 3, padding=2, dilation=2), tile=8),
    "winograd": Example(_winograd, tile=4),
    "winograd inputs": Example(_winograd, tile=4, any_size=True),
    "winograd results": Example(_winograd, tile=4, any_size=True),
    "depthwise": Example(lambda size: _convolution(size, 16, 16, 3, padding=1, groups=16), tile=8),
    "joined matmul": Example(lambda size: (_Gated(size), (torch.randn(5, 24),)), least=2),
    "dot products": Example(
        lambda size: (lambda x, y: x @ y.T, (torch.randn(5, 128), torch.randn(size, 128))), least=2
    ),
    "matmul": Example(lambda size: (nn.Linear(24, size), (torch.randn(5, 24),)), least=2),
    "pooling": Example(_pooled, tile=8),
    "volume maximum": Example(
        lambda size: (nn.MaxPool3d(2, 1, 1), (torch.randn(1, 3, 2, 2, size),))
    ),
    "reduction": Example(lambda size: _of(lambda x: torch.softmax(x, -1), 5, size), least=2),
    "column reduction": Example(lambda size: _of(lambda x: x.sum(0), 9, size)),
    "elementwise": Example(lambda size: _of(lambda x: torch.exp(x) * 2, 3, size)),
}

#: Examples for GPU rules.
GPU_EXAMPLES = {
    "nothing": Example(lambda size: _of(lambda x: x[:0] > 0, 3, size)),
    "elementwise": Example(lambda size: _of(lambda x: torch.exp(x) * 2, 3, size)),
    "row product": Example(lambda size: (nn.Linear(256, 64 * size), (torch.randn(1, 256),))),
    "uneven row product": Example(lambda size: (nn.Linear(260, 64 * size), (torch.randn(1, 260),))),
    "norm": Example(lambda size: (nn.LayerNorm(128), (torch.randn(size, 128),))),
    "reduction": Example(lambda size: _of(lambda x: x.sum(0), 64, size)),
    "general reduction": Example(lambda size: (nn.GroupNorm(2, 8), (torch.randn(2, 8, 3, size),))),
    "window": Example(lambda size: (nn.MaxPool2d(3, 2, 1), (torch.randn(1, 8, 6, size),))),
    "fallback": Example(lambda size: _of(lambda x: x.mT.exp(), size, 7)),
}
#: Each rule on each of its targets, including targets that cannot run here.
SCHEDULED = [(rule, target) for target in TARGETS.values() for rule in RULES]
SCHEDULED += [(rule, target) for target in GPUS.values() for rule in GPU_RULES]
FALLING_BACK = [(rule, NATIVE) for rule in RULES] + [(rule, GPUS["sm_90a"]) for rule in GPU_RULES]


def example_of(rule: str, target: tvm.target.Target) -> Example:
    """Return the example of a rule for the kind of a target."""
    examples = GPU_EXAMPLES if target.kind.name == "cuda" else EXAMPLES
    assert rule in examples, f"add the rule {rule!r} to the examples"
    return examples[rule]


def _name(value: Any) -> str:
    named = {**TARGETS, **GPUS}
    return next((name for name, target in named.items() if value is target), str(value))


@pytest.fixture(autouse=True)
def _symbols(request: pytest.FixtureRequest) -> Iterator[None]:
    """Declare the symbols of a rule's example to the compiler."""
    rule = request.node.callspec.params["rule"] if hasattr(request.node, "callspec") else None
    any_size = rule in EXAMPLES and EXAMPLES[rule].any_size
    known = dict.fromkeys(("s0", "s1"), sizes.Range(28, 2, 512))
    with sizes.symbols(known) if any_size else contextlib.nullcontext():
        yield


@functools.cache
def _decomposed(example: Example) -> Decomposed:
    return decompose(example.exported())


def unscheduled(rule: str, target: tvm.target.Target) -> Functions:
    """Return the functions of a rule's example, before scheduling."""
    chosen = Choices(measured=Kernels()) if target.kind.name == "cuda" else Choices()
    with warnings.catch_warnings(), choosing(chosen), target:
        warnings.simplefilter("ignore")  # deprecations inside torch and TVM
        imported = import_program(_decomposed(example_of(rule, target)))
        fused = pipeline.fuse(pipeline.lower(imported.ir_mod, target), target)
    return {v: f for v, f in fused.functions_items() if isinstance(f, tirx.PrimFunc)}


def _hashes(scheduled: tvm.IRModule, outcomes: Mapping[tvm.ir.GlobalVar, Outcome]) -> Counter[str]:
    """Count scheduled functions by their rule and the hash of their structure."""
    return Counter(f"{outcomes[v].rule} {digest(f)}" for v, f in scheduled.functions_items())


class Raising(Rule):
    """Raises an error instead of another rule."""

    def __init__(self, rule: Rule) -> None:
        self.name, self.anchors, self.rule = rule.name, rule.anchors, rule

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Schedule it, and fail."""
        if self.rule.schedule(sch, machine) is None:
            return None
        raise ValueError("no such loop")


def test_every_rule_has_an_example():
    assert EXAMPLES.keys() == RULES.keys()
    assert GPU_EXAMPLES.keys() == GPU_RULES.keys()


@pytest.mark.parametrize(("rule", "target"), SCHEDULED, ids=_name)
def test_equal_layers_are_scheduled_alike(rule: str, target: tvm.target.Target):
    rules = pipeline.backend_of(target).rules
    first, second = (unscheduled(rule, target) for _ in range(2))
    results = [apply_in_turn(rules, each, target) for each in (first, second)]
    (scheduled, outcomes), (again, _) = results
    assert rule in {outcome.rule for outcome in outcomes.values()}
    assert sorted(digest(f) for _, f in scheduled.functions_items()) == sorted(
        digest(f) for _, f in again.functions_items()
    )


@pytest.mark.parametrize(("rule", "target"), FALLING_BACK, ids=_name)
def test_after_an_error_the_next_rule_is_tried(
    rule: str, target: tvm.target.Target, monkeypatch: pytest.MonkeyPatch
):
    rules = pipeline.backend_of(target).rules
    functions = unscheduled(rule, target)
    raising: dict[str, Rule] = {**rules, rule: Raising(rules[rule])}
    with pytest.raises(RuleFailure, match=f"{rule} failed: ValueError: no such loop"):
        apply_in_turn(raising, functions, target)
    monkeypatch.delenv("TVMIFY_STRICT_COMPILER")
    scheduled, outcomes = apply_in_turn(raising, functions, target)
    assert rule in {failure.rule for each in outcomes.values() for failure in each.failures}
    without = {name: each for name, each in rules.items() if name != rule}
    expected = _hashes(*apply_in_turn(without, functions, target))
    assert _hashes(scheduled, outcomes) == expected


@pytest.mark.parametrize("rule", GPU_RULES)
def test_a_rule_for_gpus_declines_without_an_error(rule: str):
    target = GPUS["sm_90a"]
    others = {name: unscheduled(name, target) for name in GPU_EXAMPLES if name != rule}
    alone = {rule: GPU_RULES[rule]}
    for functions in others.values():
        outcomes = apply_in_turn(alone, functions, target).outcomes.values()
        assert not [failure for outcome in outcomes for failure in outcome.failures]


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # by torch, about recurrent layers
@pytest.mark.parametrize("rule", [name for name, each in EXAMPLES.items() if not each.any_size])
def test_it_is_right_with_and_without_tails(rule: str):
    example = EXAMPLES[rule]
    module, args = example.program(*example.sizes)
    kernels = Counter(programs.check(module, *args).report["kernels"].values())
    assert kernels[rule] >= sum(size >= example.least for size in example.sizes), kernels
