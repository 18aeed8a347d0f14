"""Winograd convolutions: values, accuracy, NaN and infinity, and when they are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from tvm import relax, sym, tirx

from tests.compiler.kernels.kernels import AVX2, AVX512, NATIVE, NEON, TARGETS, build, random
from tests.pairs import pairs
from tvmify.compiler.kernels.common import choice
from tvmify.compiler.kernels.common.rewriting import rewrite_body, uses
from tvmify.compiler.kernels.conv import rule as conv2d
from tvmify.compiler.kernels.conv.convolution import Convolution
from tvmify.compiler.kernels.conv.windows import Window
from tvmify.compiler.kernels.conv.winograd.cook_toom import POINTS, Filtering, transforms
from tvmify.compiler.microarchitecture import Microarchitecture

op = relax.op


class Prefer(dict):
    """Fake measurements by which one algorithm is always the fastest."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def get(self, workload, default=None):
        return self.name


@dataclass(frozen=True)
class Case:
    """A convolution of NHWC images, or of planes, followed by a bias, a residual and a ReLU."""

    shape: tuple[int, ...]
    outputs: int
    size: int = 3
    stride: int = 1
    padding: tuple[int, int] = (1, 1)
    planar: bool = False

    def arrays(self):
        """Image, residual, weights and bias."""
        image = np.maximum(random(*self.shape), 0)
        scale = np.sqrt(2 / (self.size**2 * self.shape[3])).astype("float32")
        kernel = random(self.outputs, self.size, self.size, self.shape[3], seed=1) * scale
        weights = [kernel, random(self.outputs, seed=2)]
        return [image, self.eager([image, *weights]) * 0.5], weights

    def eager(self, arrays, residual=None, dtype=torch.float32):
        image, kernel, bias = (torch.from_numpy(a).to(dtype) for a in arrays)
        result = torch.nn.functional.conv2d(
            image.permute(0, 3, 1, 2), kernel.permute(0, 3, 1, 2), bias, self.stride, self.padding
        ).permute(0, 2, 3, 1)
        if residual is not None:
            result = (result + torch.from_numpy(residual).to(dtype)).clamp(min=0)
        return result.contiguous().numpy()

    def build(self, algorithm, target=NATIVE, rectify=None):
        def describe(builder, image, residual, kernel, bias):
            convolved = op.nn.conv2d(
                image,
                kernel,
                strides=self.stride,
                padding=self.padding,
                data_layout="NCHW" if self.planar else "NHWC",
                kernel_layout="OHWI",
                out_layout="NHWC",
            )
            total = builder.emit(op.add(builder.emit(convolved), bias))
            total = builder.emit(op.add(total, residual))
            return op.maximum(total, relax.const(0.0)) if rectify is None else rectify(total)

        inputs, weights = self.arrays()
        with choice.choosing(choice.Choices(measured=Prefer(algorithm))):
            return build(describe, self.given(inputs), weights, target)

    def given(self, inputs):
        image, residual = inputs
        return [image.transpose(0, 3, 1, 2).copy() if self.planar else image, residual]

    def check(self, algorithm, target=NATIVE):
        """Check the accuracy policy: 1.5e-6 of the largest output, or five times eager's error."""
        built = self.build(algorithm, target)
        assert built.rules == {"winograd"}, built.report
        inputs, weights = self.arrays()
        actual = built.run(self.given(inputs), weights)
        arguments = [inputs[0], *weights], inputs[1]
        exact = self.eager(*arguments, torch.float64)
        errors = np.abs(actual - exact).max(), np.abs(self.eager(*arguments) - exact).max()
        error, eager = errors / np.abs(exact).max()
        assert error <= max(1.5e-6, 5 * eager)


@pytest.mark.parametrize(("results", "taps"), [*POINTS, (3, 1)])
def test_matrices_correlate_exactly(results, taps):
    matrices = transforms(results, taps)
    data = [Fraction(3 * i * i - 7 * i, 5) for i in range(results + taps - 1)]
    weights = [Fraction(2), Fraction(-1, 3), Fraction(5, 7), Fraction(-4)][:taps]

    def times(matrix, vector):
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    factors = zip(times(matrices.data, data), times(matrices.filter, weights), strict=True)
    expected = [sum(data[i + k] * weights[k] for k in range(taps)) for i in range(results)]
    assert times(matrices.result, [a * b for a, b in factors]) == expected


@pytest.mark.parametrize(
    ("results", "taps", "stride"),
    [(2, 3, 1), (4, 3, 1), (2, 3, 2), (4, 3, 2), (4, 5, 2), (4, 7, 2), (2, 3, 3), (4, 11, 4)],
)
def test_expressions_match_a_filter(results, taps, stride):
    """Each is selected by an index that becomes constant when the loop is unrolled."""
    filtering = Filtering(results, taps, stride)
    assert filtering.saves == (taps > stride)
    generator = np.random.default_rng(0)
    data, weights = generator.random(filtering.reach), generator.random(taps)

    def value(expression):
        return float(sym.Analyzer().simplify(expression))

    def constants(numbers, dtype):
        return lambda i: tirx.const(float(numbers[i]), dtype)

    products = []
    for point in map(tirx.const, range(filtering.points)):
        one = filtering.data(point, constants(data, "float32"))
        other = filtering.filter(point, constants(weights, "float64"), "float64")
        products.append(value(one) * value(other))
    for y in range(results):
        found = value(filtering.result(tirx.const(y), constants(products, "float32")))
        expected = data[y * stride : y * stride + taps] @ weights
        assert found == pytest.approx(expected, rel=1e-5)


#: Images, output channels and paddings, with and without tails of tiles and vectors.
_IMAGES = [
    ((1, 16, 16, 32), 32, (1, 1)),
    ((2, 13, 11, 20), 23, (1, 1)),
    ((3, 9, 30, 72), 40, (0, 0)),
]


@pytest.mark.parametrize(
    ("image", "target", "algorithm"),
    pairs(
        [*_IMAGES[1:], ((1, 7, 7, 130), 48, (2, 2)), ((1, 34, 34, 16), 16, (1, 1))],
        TARGETS,
        ["winograd F2", "winograd F4"],
    ),
)
def test_values(image, target, algorithm):
    shape, outputs, padding = image
    Case(shape, outputs, padding=padding).check(algorithm, target)


@pytest.mark.parametrize(
    ("image", "target", "algorithm"),
    pairs(
        [*_IMAGES, ((1, 27, 28, 130), 48, (1, 2))],
        TARGETS,
        ["winograd F2", "winograd F2 shared"],
    ),
)
def test_values_at_every_second_pixel(image, target, algorithm):
    shape, outputs, padding = image
    Case(shape, outputs, stride=2, padding=padding).check(algorithm, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("shape", "last", "stride", "padding", "algorithm"),
    [
        ((1, 49, 35, 31), -1, 2, (1, 1), "winograd F2 shared"),
        ((2, 51, 51, 65), -1, 2, (1, 1), "winograd F2 shared"),
        ((1, 39, 70, 192), 1, 1, (0, 0), "winograd F1x2 shared"),
    ],
)
def test_values_where_chunks_end_with_the_image_and_panels_with_part_of_a_vector(
    target, shape, last, stride, padding, algorithm
):
    """The last channels of these were never stored, with at least one of the targets."""
    lanes = Microarchitecture.of(target).lanes()
    outputs = lanes + last % lanes
    Case(shape, outputs, stride=stride, padding=padding).check(algorithm, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("shape", "outputs", "size", "stride", "padding"),
    [
        ((1, 64, 64, 3), 64, 7, 2, (3, 3)),
        ((2, 45, 38, 3), 24, 7, 2, (3, 3)),
        ((3, 40, 33, 1), 23, 3, 1, (1, 1)),
        ((1, 29, 70, 4), 48, 5, 2, (0, 2)),
        ((2, 37, 146, 2), 16, 3, 2, (1, 0)),
        ((1, 18, 296, 3), 64, 7, 2, (3, 3)),  # 37 tiles in a row
        ((1, 60, 59, 3), 40, 11, 4, (2, 2)),
        ((1, 5, 3, 3), 32, 7, 2, (4, 5)),  # no more than a tile
    ],
)
def test_values_of_planes(target, shape, outputs, size, stride, padding):
    Case(shape, outputs, size, stride, padding, planar=True).check("winograd F1x4", target)


@pytest.mark.parametrize(
    ("image", "target", "algorithm"),
    pairs(
        [
            ((1, 7, 7, 130), 48, (1, 1)),
            ((1, 13, 11, 20), 23, (1, 1)),
            ((1, 9, 30, 72), 40, (0, 0)),
            ((1, 5, 6, 64), 16, (2, 1)),
            ((1, 34, 34, 16), 16, (1, 2)),
        ],
        TARGETS,
        ["winograd F1x2", "winograd F1x2 shared"],
    ),
)
def test_values_of_tiles_of_one_row(image, target, algorithm):
    shape, outputs, padding = image
    Case(shape, outputs, padding=padding).check(algorithm, target)


@pytest.mark.parametrize("channels", [64, 128, 512])
def test_every_candidate_is_accurate(channels):
    size = {64: 28, 128: 28, 512: 14}[channels]
    for stride, algorithms in {1: ("F4", "F2", "F1x2"), 2: ("F2",)}.items():
        for algorithm in algorithms:
            Case((1, size, size, channels), channels, stride=stride).check(f"winograd {algorithm}")


@pytest.mark.parametrize(
    ("algorithm", "case"),
    [
        ("winograd F2", Case((1, 12, 12, 32), 32)),
        ("winograd F4", Case((1, 12, 12, 32), 32)),
        ("winograd F1x2", Case((1, 12, 12, 32), 32)),
        ("winograd F2", Case((1, 24, 24, 32), 32, stride=2)),
        ("winograd F1x4", Case((1, 40, 40, 3), 32, 7, 2, (3, 3), planar=True)),
    ],
)
def test_non_finite_values_spread_as_in_eager(algorithm, case):
    (image, residual), weights = case.arrays()
    image[0, 0, 0, 1], image[0, 5, 6, 0], image[0, 11, 4, -1] = np.nan, np.inf, -np.inf
    # A ReLU in between would hide -inf; eager's and TVM's maximum differ for NaN.
    actual = case.build(algorithm).run(case.given([image, residual]), weights)
    expected = case.eager([image, *weights], residual)
    finite = np.isfinite(expected)
    assert 0 < (~finite).sum() < finite.size / 4
    np.testing.assert_array_equal(np.isposinf(actual), np.isposinf(expected))
    np.testing.assert_allclose(actual[finite], expected[finite], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spoilt", [False, True])
def test_epilogue_conditions_do_not_select_the_tile(spoilt):
    def rectify(total):
        return op.where(op.less(total, relax.const(0.0)), relax.const(0.0), total)

    case = Case((1, 12, 12, 32), 32)
    built = case.build("winograd F4", rectify=rectify)
    assert built.rules == {"winograd"}, built.report
    (image, residual), weights = case.arrays()
    if spoilt:
        image[0, 5, 6, 0] = np.inf
    actual = built.run([image, residual], weights)
    expected = case.eager([image, *weights], residual)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def _names(size, channels, target=AVX512, count=1, **options):
    window = options.pop("window", Window((3, 3), (1, 1), (1, 1), (1, 1, 1, 1)))
    outputs = options.pop("outputs", channels)
    rows, columns = (size // stride for stride in window.strides)
    convolution = Convolution(
        (count, size, size, channels),
        (outputs, *window.size, channels),
        (count, rows, columns, outputs),
        window,
        **{"groups": 1, "dtype": "float32", **options},
    )
    machine = Microarchitecture.of(target)
    return [str(algorithm) for algorithm in conv2d.algorithms(convolution, machine)]


_EVERY_SECOND = Window((3, 3), (2, 2), (1, 1), (1, 1, 1, 1))


def test_many_weights_for_few_pixels_are_not_multiplied():
    assert _names(56, 64)[0] == "winograd F4"
    assert _names(28, 512)[0] == "winograd F4 shared"
    assert _names(14, 256)[0] == "winograd F2 shared"
    assert _names(7, 512)[0] == "winograd F1x2 shared"


def test_tiles_of_one_row_are_for_a_single_image():
    """With several images, tiles would have to end with an image, and weights are shared anyway."""
    assert "winograd F1x2" in _names(7, 512)
    assert not any("1x2" in name for name in _names(7, 512, count=2))


def test_few_inputs_are_shared_by_all_channels_with_avx2():
    # Chunks with their own inputs would each read all weights again.
    assert _names(14, 256, AVX2)[0] == "winograd F4 shared"
    assert _names(7, 512, AVX2)[0] == "winograd F2 shared"
    # The inputs of large images would be read from memory for each tile of channels.
    assert _names(56, 256, AVX2)[0] == "winograd F4"
    assert _names(28, 128, AVX2, count=4)[0] == "winograd F4"


def test_every_second_pixel():
    """Used if reading the weights, 25/9 times as many, takes less time than it saves."""
    assert _names(56, 64, window=_EVERY_SECOND, outputs=128)[0] == "winograd F2"
    assert _names(28, 128, window=_EVERY_SECOND, outputs=256)[0] == "winograd F2 shared"
    assert _names(14, 256, window=_EVERY_SECOND, outputs=512)[0].startswith("direct")
    assert _names(160, 64, AVX2, window=_EVERY_SECOND, outputs=128)[0] == "winograd F2"
    # Tiles of 4×4 read 9 times as many weights, and save a fifth of the products of 2×2.
    assert not any("F4" in name for name in _names(56, 64, window=_EVERY_SECOND, outputs=128))


def test_planes_are_for_filters_that_save_enough():
    def names(size, stride, pixels=224):
        window = Window((size, size), (stride, stride), (1, 1), (size // 2,) * 4)
        return _names(pixels, 3, window=window, outputs=64, planar=True)

    assert names(7, 2)[0] == names(11, 4)[0] == "winograd F1x4"
    assert names(3, 2)[0].startswith("direct")
    assert names(7, 2, pixels=296)[0].startswith("direct")  # 37 tiles: sums of a row leave L1
    assert names(7, 2, pixels=16)[0].startswith("direct")
    assert not any("winograd" in name for name in names(9, 2) + names(7, 1) + names(4, 4))


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"dtype": "float64"},
        {"dtype": "float16"},
        {"window": Window((3, 3), (2, 1), (1, 1), (1, 1, 1, 1))},
        {"window": Window((3, 3), (3, 3), (1, 1), (1, 1, 1, 1))},
        {"window": Window((3, 3), (1, 1), (2, 2), (2, 2, 2, 2))},
        {"window": Window((5, 5), (1, 1), (1, 1), (2, 2, 2, 2))},
        {"window": Window((3, 1), (1, 1), (1, 1), (1, 0, 1, 0))},
    ],
)
def test_unsupported_convolutions(options):
    assert all(name.startswith("direct") for name in _names(28, 64, **options))


def test_strict_accuracy_is_direct():
    with choice.choosing(choice.Choices("strict")):
        assert all(name.startswith("direct") for name in _names(56, 64))


def test_neon_multiplies_and_adds_vectors():
    built = Case((1, 16, 16, 32), 32).build("winograd F4", NEON)
    assert built.rules == {"winograd"}, built.report
    assert "fmla\tv" in built.assembly()


@pytest.mark.parametrize("algorithm", ["winograd F2", "winograd F1x2"])
def test_inputs_that_other_cores_transformed_are_fetched_ahead(algorithm):
    """Each tile prefetches the inputs of the next, also of another block or point."""
    case = Case((1, 14, 14, 128), 64)
    built = case.build(algorithm + " shared", AVX512)
    loops, fetched = [], _prefetches(built)

    def visit(stmt):
        if isinstance(stmt, tirx.For):
            loops.append(stmt)

    rewrite_body(built.kernel(), visit)
    data, *_ = (load for load, _ in fetched if "data" in load.source.name)  # its first line
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
    own = case.build(algorithm)
    assert "address_of(winograd_data" not in own.kernel().script()


def test_weights_from_memory_are_fetched_two_blocks_ahead():
    """The next block into L1, the one after it into L2."""

    def fetched(outputs):
        built = Case((1, 14, 14, 256), outputs).build("winograd F2 shared", AVX512)
        return [found for found in _prefetches(built) if "data" not in found[0].source.name]

    (next_one, first), (after_it, second) = fetched(128)
    assert (first, second) == (3, 2)
    distance = after_it.indices[-1] - next_one.indices[-1]
    assert int(sym.Analyzer().simplify(distance)) == 64 * 64  # elements of a block
    assert [cache for _, cache in fetched(16)] == [3]  # L2 keeps these


def _prefetches(built):
    """The prefetched loads, and LLVM's number of the cache for each."""
    found = []

    def visit(stmt):
        if isinstance(stmt, tirx.Evaluate) and "prefetch" in str(stmt.value.op):
            address, _, cache, _ = stmt.value.args
            found.append((address.args[0], int(cache)))

    rewrite_body(built.kernel(), visit)
    return found
