"""Convolutions of every form: direct, pointwise, grouped, depthwise."""

from __future__ import annotations

import re
from math import prod

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm import relax, tirx

from tests.compiler import symbolic
from tests.compiler.kernels.kernels import (
    AVX2,
    AVX512,
    NATIVE,
    NEON,
    TARGETS,
    build,
    check,
    has_parallel_loop,
    loops,
    random,
    widest_vector,
)
from tvmify.compiler.kernels.common import choice
from tvmify.compiler.kernels.conv import template as direct
from tvmify.compiler.kernels.conv.convolution import Convolution
from tvmify.compiler.kernels.conv.windows import Window
from tvmify.compiler.microarchitecture import Microarchitecture

op = relax.op


@pytest.fixture(autouse=True)
def direct_only():
    """Use strict accuracy, which allows only the direct kernel; `test_winograd` has the others."""
    with choice.choosing(choice.Choices("strict")):
        yield


def _convolution(stride, padding, dilation, groups):
    def describe(builder, image, kernel, bias):
        convolved = builder.emit(
            op.nn.conv2d(
                image,
                kernel,
                strides=stride,
                padding=padding,
                dilation=dilation,
                groups=groups,
                data_layout="NHWC",
                kernel_layout="OHWI",
            )
        )
        return op.nn.relu(builder.emit(op.add(convolved, bias)))

    def reference(image, kernel, bias):
        top, left, bottom, right = padding if len(padding) == 4 else (*padding, *padding)
        nchw, weight = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (image, kernel))
        nchw = torch.nn.functional.pad(nchw, (left, right, top, bottom))
        result = torch.nn.functional.conv2d(
            nchw, weight, torch.from_numpy(bias), stride, 0, dilation, groups
        )
        return result.relu().permute(0, 2, 3, 1).numpy()

    return describe, reference


def _check(
    shape, out, window, rule, target, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1
):
    kernel = random(out, *window, shape[3] // groups, seed=1)
    describe, reference = _convolution(stride, padding, dilation, groups)
    inputs = [random(*shape)]
    return check(
        describe, reference, inputs, [kernel, random(out, seed=2)], rule=rule, target=target
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("shape", "out", "window", "options"),
    [
        ((2, 13, 11, 5), 7, (3, 3), {"padding": (1, 1)}),
        ((1, 15, 9, 6), 9, (3, 2), {"padding": (1, 0, 2, 1), "stride": (2, 1)}),
        ((1, 20, 20, 3), 40, (7, 7), {"padding": (3, 3), "stride": (2, 2)}),
        ((1, 14, 14, 24), 20, (3, 3), {"padding": (2, 2), "dilation": (2, 2), "groups": 4}),
        ((3, 8, 8, 12), 24, (1, 1), {"groups": 3}),
        ((1, 7, 7, 33), 65, (1, 1), {"stride": (2, 2), "padding": (1, 1)}),
        ((1, 1, 30, 8), 16, (1, 5), {"padding": (0, 2)}),
        # Few pixels and many weights: one block of input channels after the other.
        ((2, 7, 7, 512), 64, (3, 3), {"padding": (1, 1)}),
        # The last block is shorter: with and without a border, in groups.
        ((1, 9, 9, 46), 40, (3, 3), {"padding": (1, 1)}),
        ((1, 9, 9, 131), 20, (3, 3), {"stride": (2, 2)}),
        ((1, 8, 8, 17), 20, (5, 5), {"padding": (2, 2)}),
        ((1, 8, 8, 46), 64, (3, 3), {"padding": (1, 1), "groups": 2}),
        ((1, 8, 8, 208), 64, (3, 3), {"padding": (1, 1), "groups": 16}),
    ],
)
def test_direct(target, shape, out, window, options):
    built = _check(shape, out, window, "conv2d", target, **options)
    assert widest_vector(built.kernel()) > 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("shape", "window", "options"),
    [
        ((2, 9, 11, 7), (5, 5), {"padding": (2, 2), "stride": (2, 2)}),
        ((1, 12, 12, 40), (3, 3), {"padding": (2, 2), "dilation": (2, 2)}),
        ((1, 40, 20, 16), (7, 7), {"padding": (3, 3, 2, 3)}),
    ],
)
def test_depthwise(target, shape, window, options):
    built = _check(shape, shape[3], window, "depthwise", target, groups=shape[3], **options)
    assert widest_vector(built.kernel()) > 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("shape", "out", "window", "options"),
    [
        # Pixels numbered consecutively; with a border, and a last tile longer than the image.
        ((2, 13, 13, 70), 48, (3, 3), {"stride": (2, 2), "padding": (1, 1)}),
        ((1, 9, 11, 131), 96, (3, 3), {"padding": (1, 1)}),
        ((1, 14, 10, 12), 64, (2, 2), {"stride": (2, 2)}),
        # Several tiles of channels in a group, and one that belongs to two groups.
        ((1, 8, 8, 24), 32, (3, 3), {"padding": (1, 1), "groups": 2}),
        ((2, 7, 7, 32), 48, (3, 3), {"padding": (1, 1), "groups": 2}),
    ],
)
def test_every_candidate_is_right(target, shape, out, window, options):
    shapes = [list(shape), [out, *window, shape[3] // options.get("groups", 1)]]
    arrays = [random(*sizes, seed=i) for i, sizes in enumerate(shapes)] + [random(out, seed=2)]
    attributes = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, **options}
    with choice.choosing(choice.Choices(most=20)) as collected:
        build(_convolution(**attributes)[0], arrays[:1], arrays[1:], target)
    ((workload, names),) = collected.candidates.items()
    names = [name for name in names if name.startswith("direct")]
    assert len(set(names)) == len(names) > 2
    for name in names:
        with choice.choosing(choice.Choices(measured={workload: name})):
            _check(shape, out, window, "conv2d", target, **options)


@pytest.mark.parametrize("target", [AVX512, AVX2, NEON])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("size", [7, 8, 14])
def test_groups_of_any_size_have_a_kernel(target, groups, size):
    describe, _ = _convolution((1, 1), (1, 1), (1, 1), groups)
    for inputs, outputs in [(16, 16), (16, 24), (128, 24), (64, 128), (24, 64)]:
        weights = [random(groups * outputs, 3, 3, inputs, seed=1), random(groups * outputs, seed=2)]
        built = build(describe, [random(1, size, size, groups * inputs)], weights, target)
        assert built.rules == {"conv2d"}, built.report


def _candidates(size, channels, out, window, stride, padding, target, count=1):
    along = (size + 2 * padding - window) // stride + 1
    with choice.choosing(choice.Choices()):
        convolution = Convolution(
            (count, size, size, channels),
            (out, window, window, channels),
            (count, along, along, out),
            Window((window, window), (stride, stride), (1, 1), (padding,) * 4),
            1,
            "float32",
        )
        return direct.candidates(convolution, Microarchitecture.of(target))


@pytest.mark.parametrize("target", [AVX512, AVX2])
def test_pixels_of_a_tile_lie_below_each_other(target):
    # Neighbours in a row share inputs; LLVM keeps too many of them in registers, and spills.
    tile = _candidates(256, 3, 32, 3, 1, 1, target)[0].tile
    assert tile.down >= tile.across > 1


@pytest.mark.parametrize("target", [AVX512, AVX2])
def test_few_rows_of_tiles_are_not_shared_out(target):
    first, *_ = _candidates(224, 3, 768, 16, 16, 0, target)  # ViT: two to seven rows of tiles
    assert not first.rows_first
    for count in (1, 4):
        first, *_ = _candidates(224, 3, 64, 7, 2, 3, target, count)
        assert first.rows_first


def test_two_blocks_of_channels_are_one_if_their_sums_are_large():
    assert _candidates(56, 96, 192, 2, 2, 0, AVX512)[0].block == 96
    assert _candidates(14, 96, 192, 2, 2, 0, AVX512)[0].block < 96  # 49 pixels


def test_pixels_of_small_images_are_numbered_through():
    best = _candidates(14, 256, 512, 3, 2, 1, AVX2)[0]  # 49 pixels, where rows make 56
    assert best.tile.flat
    assert prod(best.tile.counts(7, 7)) * best.tile.pixels < 56
    assert not _candidates(28, 128, 256, 3, 1, 1, AVX512)[0].tile.flat  # tiles divide a row
    # A border is added to rows where they are used: that needs whole rows.
    assert not any(each.tile.flat for each in _candidates(224, 3, 64, 7, 2, 3, AVX2))


@pytest.mark.parametrize(("target", "registers"), [(AVX2, 16), (AVX512, 32), (NEON, 32)])
def test_a_window_leaves_a_register(target, registers):
    lanes = Microarchitecture.of(target).lanes()
    for each in _candidates(224, 3, 768, 16, 16, 0, target):
        vectors = each.tile.channels // lanes
        assert each.tile.pixels * vectors + vectors + 1 < registers


def test_no_copy_without_padding():
    describe, _ = _convolution((2, 2), (0, 0), (1, 1), 1)
    weights = [random(64, 2, 2, 32, seed=1), random(64, seed=2)]
    text = build(describe, [random(1, 14, 14, 32)], weights).kernel().script()
    assert direct.PAD not in text
    assert direct.ANCHOR in text


def test_short_reductions_are_unrolled():
    def unrolled(*args, **options):
        kernel = _check(*args, target=NATIVE, **options).kernel()
        return [int(x.extent) for x in loops(kernel) if x.kind == tirx.ForKind.UNROLLED]

    window = unrolled((1, 14, 14, 32), 32, (3, 5), "depthwise", groups=32, padding=(1, 2))
    assert {3, 5} <= set(window)
    assert 3 in unrolled((1, 20, 16, 3), 64, (5, 5), "conv2d")  # the channels of an image


def test_pointwise_is_a_matrix_product():
    _check((2, 9, 7, 20), 30, (1, 1), "matmul", NATIVE)


@pytest.mark.parametrize("flat", [False, True])
def test_residual_and_activation_are_fused(flat):
    size, channels = (9, 256) if flat else (10, 8)

    def describe(builder, image, other, kernel):
        convolved = builder.emit(
            op.nn.conv2d(image, kernel, padding=1, data_layout="NHWC", kernel_layout="OHWI")
        )
        total = builder.emit(op.add(convolved, other))
        return op.multiply(total, builder.emit(op.sigmoid(total)))

    def reference(image, other, kernel):
        nchw, weight = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (image, kernel))
        total = torch.nn.functional.conv2d(nchw, weight, padding=1).permute(0, 2, 3, 1)
        total = total + torch.from_numpy(other)
        return torch.nn.functional.silu(total).numpy()

    inputs = [random(1, size, size, channels), random(1, size, size, 64, seed=1)]
    weights = [random(64, 3, 3, channels, seed=2)]
    with choice.choosing(choice.Choices(most=99)) as collected:
        build(describe, inputs, weights)
    ((workload, names),) = collected.candidates.items()
    name = next(n for n in names if n.startswith("direct") and (" flat " in n) == flat)
    with choice.choosing(choice.Choices(measured={workload: name})):
        check(describe, reference, inputs, weights, rule="conv2d")


def test_result_may_be_stored_in_another_layout():
    def describe(builder, image, kernel):
        convolved = builder.emit(
            op.nn.conv2d(image, kernel, padding=1, data_layout="NHWC", kernel_layout="OHWI")
        )
        return op.permute_dims(convolved, [0, 3, 1, 2])

    inputs, weights = [random(1, 10, 10, 8)], [random(24, 3, 3, 8, seed=2)]
    built = build(describe, inputs, weights)
    assert "unscheduled" not in built.report.values()
    nchw, weight = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (*inputs, *weights))
    expected = torch.nn.functional.conv2d(nchw, weight, padding=1).numpy()
    np.testing.assert_allclose(built.run(inputs, weights), expected, rtol=1e-4, atol=1e-4)


def test_parallel_only_when_worth_it():
    describe, _ = _convolution((1, 1), (1, 1), (1, 1), 1)

    def of(size, channels):
        weights = [random(channels, 3, 3, channels, seed=1), random(channels, seed=2)]
        return build(describe, [random(1, size, size, channels)], weights).kernel()

    assert has_parallel_loop(of(28, 64))
    assert not has_parallel_loop(of(6, 8))


@pytest.mark.parametrize(("groups", "rule"), [(1, "conv2d"), (16, "depthwise")])
def test_neon_multiplies_and_adds_vectors(groups, rule):
    describe, _ = _convolution((2, 2), (1, 1), (1, 1), groups)
    weights = [random(16, 3, 3, 16 // groups, seed=1), random(16, seed=2)]
    built = build(describe, [random(1, 8, 8, 16)], weights, NEON)
    assert built.rules == {rule}
    assert re.search(r"fmla\tv\d+\.4s", built.assembly())


def test_images_of_any_size_with_padded_rows():
    """With 128 channels, TVM could not simplify the position of an element in a padded row."""
    weights = [random(128, 4, 3, 3, seed=1), random(128, 128, 3, 3, seed=2) / 16]

    def two(builder, image, first, second):
        half = builder.emit(op.nn.relu(builder.emit(op.nn.conv2d(image, first, 2, 1))))
        return op.nn.conv2d(half, second, 1, 1)

    def expected(image, first, second):
        image, first, second = map(torch.from_numpy, (image, first, second))
        return F.conv2d(F.conv2d(image, first, None, 2, 1).relu(), second, None, 1, 1).numpy()

    program = symbolic.build(two, [((1, 4, "s0", "s1"), "float32")], weights, hint=32)
    for height, width in ((5, 40), (16, 17), (33, 2)):
        symbolic.check(program, expected, [random(1, 4, height, width, seed=3)], weights)


def test_groups_of_images_of_any_size_without_padding():
    """The result has height - 2 rows, an expression that TVM cannot divide."""
    weights = [random(6, 2, 3, 3)]

    def describe(builder, image, weight):
        return op.nn.conv2d(image, weight, groups=2)

    def expected(image, weight):
        return F.conv2d(*map(torch.from_numpy, (image, weight)), groups=2).numpy()

    program = symbolic.build(describe, [(("s0", 4, "s1", "s2"), "float32")], weights, hint=8)
    assert "conv2d" in program.rules
    for shape in ((2, 4, 7, 9), (3, 4, 16, 3)):
        symbolic.check(program, expected, [random(*shape, seed=3)], weights)


def test_two_sequences_of_any_length_without_padding():
    """A static batch size is a factor of both terms of the number of rows."""
    weights = [random(16, 16, 3, 1)]

    def describe(builder, image, weight):
        return op.nn.conv2d(image, weight, dilation=(2, 1))

    def expected(image, weight):
        return F.conv2d(*map(torch.from_numpy, (image, weight)), dilation=(2, 1)).numpy()

    program = symbolic.build(describe, [((2, 16, "s0", 1), "float32")], weights, hint=8)
    assert not any("failed" in outcome for outcome in program.report.values())
    for length in (9, 16, 40):
        symbolic.check(program, expected, [random(2, 16, length, 1, seed=3)], weights)


@pytest.mark.parametrize("stride", [1, 2])
def test_sequences_of_any_length_are_cut_into_tiles_of_several_pixels(stride):
    weights = [random(64, 16, 3, 1)]

    def describe(builder, image, weight):
        return op.nn.conv2d(image, weight, (stride, 1), (1, 0))

    def expected(image, weight):
        image, weight = map(torch.from_numpy, (image, weight))
        return F.conv2d(image, weight, None, (stride, 1), (1, 0)).numpy()

    program = symbolic.build(describe, [((1, 16, "s0", 1), "float32")], weights)
    kernel = next(f for v, f in program.ir_mod.functions_items() if "conv2d" in v.name_hint)
    rows = [loop for loop in loops(kernel) if loop.loop_var.name.startswith("y_1")]
    assert rows and all(int(loop.extent) > 1 for loop in rows)
    for length in (2, 7, 8, 9, 15, 16, 17, 61):
        symbolic.check(program, expected, [random(1, 16, length, 1, seed=3)], weights)
