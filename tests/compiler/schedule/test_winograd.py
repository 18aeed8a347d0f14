"""Winograd convolutions: values, accuracy, what is not a number, and when they are chosen."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from tvm import relax, sym, tirx

from tests.compiler.schedule.kernels import (
    AVX2,
    AVX512,
    NATIVE,
    NEON,
    TARGETS,
    Built,
    build,
    random,
)
from tvmify.compiler.schedule import choice, conv2d
from tvmify.compiler.schedule.cook_toom import row, transforms
from tvmify.compiler.schedule.microarchitecture import Microarchitecture
from tvmify.compiler.schedule.rewriting import rewrite_body, uses
from tvmify.compiler.schedule.windows import Window

op = relax.op


class Prefer(dict):
    """Measurements by which one algorithm is the fastest everywhere."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def get(self, workload, default=None):
        return self.name


def _build(shape, outputs, algorithm, target=NATIVE, padding=(1, 1), rectify=None):
    def describe(builder, image, residual, kernel, bias):
        convolved = builder.emit(
            op.nn.conv2d(image, kernel, padding=padding, data_layout="NHWC", kernel_layout="OHWI")
        )
        total = builder.emit(op.add(builder.emit(op.add(convolved, bias)), residual))
        return op.maximum(total, relax.const(0.0)) if rectify is None else rectify(total)

    image = np.maximum(random(*shape), 0)
    scale = np.sqrt(2 / (9 * shape[3])).astype("float32")
    kernel, bias = random(outputs, 3, 3, shape[3], seed=1) * scale, random(outputs, seed=2)
    residual = _eager([image, kernel, bias], padding) * 0.5
    with choice.choosing(choice.Choices(measured=Prefer(algorithm))):
        built = build(describe, [image, residual], [kernel, bias], target)
    return built, [image, residual], [kernel, bias]


def _eager(arrays, padding, residual=None, dtype=torch.float32):
    image, kernel, bias = (torch.from_numpy(a).to(dtype) for a in arrays)
    result = torch.nn.functional.conv2d(
        image.permute(0, 3, 1, 2), kernel.permute(0, 3, 1, 2), bias, 1, padding
    ).permute(0, 2, 3, 1)
    if residual is not None:
        result = (result + torch.from_numpy(residual).to(dtype)).clamp(min=0)
    return result.contiguous().numpy()


def _errors(built: Built, inputs, weights, padding=(1, 1)):
    image, residual = inputs
    actual = built.run(inputs, weights)
    exact = _eager([image, *weights], padding, residual, torch.float64)
    eager = _eager([image, *weights], padding, residual)
    scale = np.abs(exact).max()
    return np.abs(actual - exact).max() / scale, np.abs(eager - exact).max() / scale


@pytest.mark.parametrize("results", [2, 4])
def test_matrices_correlate_exactly(results):
    matrices = transforms(results)
    data = [Fraction(3 * i * i - 7 * i, 5) for i in range(results + 2)]
    taps = [Fraction(2), Fraction(-1, 3), Fraction(5, 7)]

    def times(matrix, vector):
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    products = [
        a * b for a, b in zip(times(matrices.data, data), times(matrices.filter, taps), strict=True)
    ]
    expected = [sum(data[i + k] * taps[k] for k in range(3)) for i in range(results)]
    assert times(matrices.result, products) == expected


@pytest.mark.parametrize("results", [2, 4])
@pytest.mark.parametrize(("name", "pairs"), [("data", False), ("filter", False), ("result", True)])
def test_points_that_share_arithmetic_have_the_same_rows(results, name, pairs):
    matrix = getattr(transforms(results), name)
    vector = [0.5 + i * i for i in range(len(matrix[0]))]

    def element(i):
        return tirx.const(vector[i], "float64")

    for index, coefficients in enumerate(matrix):
        value = sym.Analyzer().simplify(row(matrix, tirx.const(index), element, "float64", pairs))
        expected = sum(float(c) * v for c, v in zip(coefficients, vector, strict=True))
        assert float(value) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("shape", "outputs", "padding"),
    [
        ((1, 16, 16, 32), 32, (1, 1)),
        ((2, 13, 11, 20), 23, (1, 1)),
        ((3, 9, 30, 72), 40, (0, 0)),
        ((1, 7, 7, 130), 48, (2, 2)),
        ((1, 34, 34, 16), 16, (1, 1)),
    ],
)
@pytest.mark.parametrize("algorithm", ["winograd F2", "winograd F4"])
def test_values(target, shape, outputs, padding, algorithm):
    _check(shape, outputs, algorithm, target, padding)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("shape", "outputs", "padding"),
    [
        ((1, 7, 7, 130), 48, (1, 1)),
        ((1, 13, 11, 20), 23, (1, 1)),
        ((1, 9, 30, 72), 40, (0, 0)),
        ((1, 5, 6, 64), 16, (2, 1)),
        ((1, 34, 34, 16), 16, (1, 2)),
    ],
)
@pytest.mark.parametrize("algorithm", ["winograd F1x2", "winograd F1x2 shared"])
def test_values_of_tiles_of_one_row(target, shape, outputs, padding, algorithm):
    _check(shape, outputs, algorithm, target, padding)


def _check(shape, outputs, algorithm, target, padding):
    built, inputs, weights = _build(shape, outputs, algorithm, target, padding)
    assert built.rules == {"winograd"}, built.report
    error, eager = _errors(built, inputs, weights, padding)
    assert error <= max(1.5e-6, 5 * eager)


@pytest.mark.parametrize("channels", [64, 128, 512])
def test_accuracy_holds_whatever_is_chosen(channels):
    size = {64: 28, 128: 28, 512: 14}[channels]
    image = np.maximum(random(1, size, size, channels), 0)
    for algorithm in ("winograd F4", "winograd F2", "winograd F1x2"):
        built, inputs, weights = _build(image.shape, channels, algorithm)
        error, eager = _errors(built, inputs, weights)
        assert error <= max(1.5e-6, 5 * eager)


@pytest.mark.parametrize("algorithm", ["winograd F2", "winograd F4", "winograd F1x2"])
def test_what_is_not_finite_spreads_no_further_than_in_eager(algorithm):
    built, (image, residual), weights = _build((1, 12, 12, 32), 32, algorithm)
    image[0, 0, 0, 3], image[0, 5, 6, 0], image[0, 11, 4, 31] = np.nan, np.inf, -np.inf
    # The rectifier between would hide a -inf; eager's and TVM's maximum differ in NaN.
    actual = built.run([image, residual], weights)
    expected = _eager([image, *weights], (1, 1), residual)
    finite = np.isfinite(expected)
    assert 0 < (~finite).sum() < finite.size / 4
    np.testing.assert_array_equal(np.isposinf(actual), np.isposinf(expected))
    np.testing.assert_allclose(actual[finite], expected[finite], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spoilt", [False, True])
def test_conditions_of_what_follows_are_not_taken_for_the_choice_of_a_tile(spoilt):
    def rectify(total):
        return op.where(op.less(total, relax.const(0.0)), relax.const(0.0), total)

    built, (image, residual), weights = _build((1, 12, 12, 32), 32, "winograd F4", rectify=rectify)
    assert built.rules == {"winograd"}, built.report
    if spoilt:
        image[0, 5, 6, 0] = np.inf
    actual = built.run([image, residual], weights)
    expected = _eager([image, *weights], (1, 1), residual)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def _names(size, channels, target=AVX512, **options):
    count = options.get("count", 1)
    image, kernel = [count, size, size, channels], [channels, 3, 3, channels]
    window = Window((3, 3), options.get("strides", (1, 1)), (1, 1), (1, 1, 1, 1))
    found = conv2d.algorithms(
        image,
        kernel,
        (count, size, size, channels),
        window,
        options.get("groups", 1),
        options.get("dtype", "float32"),
        Microarchitecture.of(target),
    )
    return [str(algorithm) for algorithm in found]


def test_many_weights_for_few_pixels_are_not_multiplied():
    assert _names(56, 64)[0] == "winograd F4"
    assert _names(28, 512)[0] == "winograd F4 shared"
    assert _names(14, 256)[0] == "winograd F2 shared"
    assert _names(7, 512)[0] == "winograd F1x2 shared"


def test_tiles_of_one_row_are_for_a_single_image():
    """Of more, their rows would have to end with an image; and they share the weights anyway."""
    assert "winograd F1x2" in _names(7, 512)
    assert not any("1x2" in name for name in _names(7, 512, count=2))


def test_few_inputs_are_shared_by_all_channels_with_avx2():
    # Each chunk with inputs of its own reads all weights again.
    assert _names(14, 256, AVX2)[0] == "winograd F4 shared"
    assert _names(7, 512, AVX2)[0] == "winograd F2 shared"
    # The inputs of large images would be read from memory for each tile of channels.
    assert _names(56, 256, AVX2)[0] == "winograd F4"
    assert _names(28, 128, AVX2, count=4)[0] == "winograd F4"


@pytest.mark.parametrize(
    "options", [{"strides": (2, 2)}, {"groups": 2}, {"dtype": "float64"}, {"dtype": "float16"}]
)
def test_what_winograd_is_not_for(options):
    assert all(name.startswith("direct") for name in _names(28, 64, **options))


def test_strict_accuracy_is_direct():
    with choice.choosing(choice.Choices("strict")):
        assert all(name.startswith("direct") for name in _names(56, 64))


def test_neon_multiplies_and_adds_vectors():
    built, _, _ = _build((1, 16, 16, 32), 32, "winograd F4", NEON)
    assert built.rules == {"winograd"}, built.report
    assert "fmla\tv" in built.assembly()


@pytest.mark.parametrize("algorithm", ["winograd F2", "winograd F1x2"])
def test_inputs_that_other_cores_transformed_are_fetched_ahead(algorithm):
    """By each tile those of the next one, also where that is of another block or point."""
    built, _, _ = _build((1, 14, 14, 128), 64, algorithm + " shared")
    loops, fetched = [], []

    def visit(stmt):
        if isinstance(stmt, tirx.For):
            loops.append(stmt)
        if isinstance(stmt, tirx.Evaluate) and "prefetch" in str(stmt.value.op):
            fetched.append(stmt.value.args[0].args[0])

    rewrite_body(built.kernel(), visit)
    data, *_ = (load for load in fetched if "data" in load.source.name)  # its first line
    nest = [loop for loop in loops if any(uses(i, [loop.loop_var]) for i in data.indices)]
    *several, _ = [loop for loop in nest if int(loop.extent) > 1]  # the last is along the block
    points, blocks, groups = (int(loop.extent) for loop in several)
    if algorithm == "winograd F2":
        assert (points, blocks) == (16, 128 // 64)
        wanted = [
            [0, 0, g, p, 0, o * 64]
            for p, o, g in product(range(points), range(blocks), range(groups))
        ]
    else:
        assert (points, blocks) == (4, 3 * 128 // 64)
        rows = 14 * 7 // groups  # of the product: tiles of 14 rows, 7 in each
        wanted = [
            [0, 0, p, g * rows + o // 2 * 7, o % 2 * 64]
            for p, o, g in product(range(points), range(blocks), range(groups))
        ]
    found, analyzer = [], sym.Analyzer()
    for places in product(range(points), range(blocks), range(groups)):
        for loop in nest:
            analyzer.bind(loop.loop_var, tirx.const(0, "int64"), allow_override=True)
        for loop, place in zip(several, places, strict=True):
            analyzer.bind(loop.loop_var, tirx.const(place, "int64"), allow_override=True)
        found.append([int(analyzer.simplify(i)) for i in data.indices])
    assert found == wanted[1:] + wanted[:1]
    own, _, _ = _build((1, 14, 14, 128), 64, algorithm)
    assert "address_of(winograd_data" not in own.kernel().script()
