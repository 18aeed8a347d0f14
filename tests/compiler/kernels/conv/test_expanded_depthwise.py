"""A 1×1 convolution and a depthwise one after it, as one kernel."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from torch.nn import functional as F
from tvm import relax

from tests.compiler import programs
from tests.compiler.kernels.kernels import NATIVE, TARGETS, Array, random
from tvmify.compiler import pipeline
from tvmify.compiler.kernels.common import choice

JOINED = "expanded depthwise"


class Network:
    """``filter(relu6(x * wide + bias)) + bias``, through the pipeline."""

    def __init__(
        self,
        image: tuple[int, ...],
        channels: int,
        size: int = 3,
        stride: int = 1,
        padding: int | tuple[int, ...] | None = None,
        again: bool = False,
        accuracy: str = "default",
        target: tvm.target.Target = NATIVE,
        measured: Mapping[str, str] | None = None,
    ) -> None:
        self.inputs = [random(*image)]
        self.weights = [
            random(channels, image[1], 1, 1, seed=1),
            random(1, channels, 1, 1, seed=2),
            random(channels, 1, size, size, seed=3),
            random(1, channels, 1, 1, seed=4),
        ]
        self.stride, self.again = stride, again
        self.padding = size // 2 if padding is None else padding
        self.target = target
        arrays = [*self.inputs, *self.weights]
        variables = [
            relax.Var(f"v{i}", relax.TensorType(a.shape, "float32")) for i, a in enumerate(arrays)
        ]
        builder = relax.BlockBuilder()
        with builder.function("main", variables, attrs={"num_input": 1}):
            with builder.dataflow():
                result = self.describe(builder, *variables)
                result = builder.emit_output(relax.Tuple([builder.emit(result)]))
            builder.emit_func_output(result)
        choices = choice.Choices(accuracy, measured or {})
        with choice.choosing(choices) as self.collected:
            fused = pipeline.fuse(pipeline.lower(builder.finalize(), target), target)
            self.ir_mod, outcomes = pipeline.schedule(fused, target)
        self.rules = sorted(str(one) for name, one in outcomes.items() if "pack" not in name)

    def describe(self, builder: relax.BlockBuilder, *variables: relax.Var) -> relax.Expr:
        x, wide, bias, narrow, offset = variables
        channels = len(self.weights[1][0])
        y = builder.emit(relax.op.add(relax.op.nn.conv2d(x, wide), bias))
        y = builder.emit(relax.op.minimum(relax.op.nn.relu(y), relax.const(6.0)))
        z = relax.op.nn.conv2d(y, narrow, self.stride, self.padding, groups=channels)
        z = builder.emit(relax.op.add(builder.emit(z), offset))
        return relax.op.add(z, y) if self.again else z

    def run(self) -> Array:
        executable = relax.build(
            pipeline.plan_memory(self.ir_mod, self.target),
            target=self.target,
            relax_pipeline=tvm.transform.Sequential([]),
        )
        machine = relax.VirtualMachine(executable, tvm.cpu())
        weights = machine["pack"](*(tvm.runtime.tensor(w) for w in self.weights))
        (result,) = machine["main"](*(tvm.runtime.tensor(x) for x in self.inputs), *weights)
        return result.numpy()

    def expected(self) -> Array:
        x, wide, bias, narrow, offset = (
            torch.from_numpy(a).double() for a in (*self.inputs, *self.weights)
        )
        y = (F.conv2d(x, wide) + bias).clamp(0, 6)
        padding = self.padding
        if not isinstance(padding, int):
            top, left, bottom, right = padding
            padded, padding = F.pad(y, (left, right, top, bottom)), 0
        else:
            padded = y
        z = F.conv2d(padded, narrow, None, self.stride, padding, groups=len(narrow)) + offset
        return (z + y if self.again else z).numpy()


def check(network: Network) -> None:
    actual, expected = network.run(), network.expected()
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("image", "channels", "size", "stride", "padding"),
    [
        ((2, 16, 13, 9), 96, 3, 2, None),  # tiles that overlap, bands that end early
        ((1, 24, 15, 17), 144, 5, 2, None),
        ((1, 16, 12, 12), 96, 3, 2, (0, 0, 1, 1)),  # padding rows only at the bottom
        ((1, 16, 12, 12), 96, 3, 1, 0),
        ((1, 8, 10, 10), 48, 7, 1, None),  # a window that is not unrolled
        ((1, 16, 112, 112), 96, 3, 2, None),  # several bands
    ],
)
def test_two_convolutions_are_one_kernel(image, channels, size, stride, padding, target):
    network = Network(image, channels, size, stride, padding, target=target)
    assert network.rules.count(JOINED) == 1
    assert not {"matmul", "depthwise"} & set(network.rules)
    check(network)


@pytest.mark.thorough
def test_every_cut_of_the_second_convolution():
    shape = (1, 16, 24, 24), 96
    asked = Network(*shape).collected.candidates
    (workload,) = (name for name in asked if name.startswith("depthwise"))
    assert len(asked[workload]) >= 4
    for name in asked[workload]:
        network = Network(*shape, measured={workload: name})
        assert JOINED in network.rules
        check(network)


def test_wide_image_read_again_is_kept():
    network = Network((1, 16, 12, 12), 96, again=True)
    assert JOINED not in network.rules
    check(network)


def test_partial_vectors_of_channels_are_not_fused():
    network = Network((1, 4, 12, 12), 20)
    assert JOINED not in network.rules
    check(network)


def test_strict_accuracy_keeps_blocked_sums():
    network = Network((1, 192, 7, 7), 96, accuracy="strict")
    assert JOINED not in network.rules
    check(network)


def test_nan_and_infinities_stay_in_the_window():
    network = Network((1, 16, 24, 24), 96)
    network.inputs[0][0, :, 10, 10] = np.nan
    result = network.run()
    assert np.isnan(result[0, :, 9:12, 9:12]).all()
    assert np.isfinite(np.delete(result[0], [9, 10, 11], axis=1)).all()


def test_broadcast_result_is_kept():
    class Broadcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expand, self.filter = nn.Conv2d(16, 96, 1), nn.Conv2d(96, 96, 3, groups=96)

        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.filter(self.expand(x).relu()) + other

    artifact = programs.check(Broadcast(), torch.randn(1, 16, 12, 12), torch.randn(4, 96, 10, 10))
    assert JOINED not in artifact.report["kernels"].values()
