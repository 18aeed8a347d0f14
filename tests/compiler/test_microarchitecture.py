"""Tiles that fit the processor, derived from the target only."""

from __future__ import annotations

import pytest
import tvm

from tests.compiler.kernels.kernels import AVX2, AVX512, NEON
from tvmify.compiler.kernels.common import tiles
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of

MACHINES = [
    pytest.param(AVX512, 16, 32, id="avx512"),
    pytest.param(AVX2, 8, 16, id="avx2"),
    pytest.param(NEON, 4, 32, id="neon"),
    pytest.param(tvm.target.Target({"kind": "llvm", "mcpu": "cascadelake"}), 16, 32, id="mcpu"),
    pytest.param(tvm.target.Target({"kind": "llvm", "mcpu": "x86-64"}), 4, 16, id="sse"),
]


@pytest.mark.parametrize(("target", "lanes", "registers"), MACHINES)
def test_registers(target, lanes, registers):
    machine = Microarchitecture.of(target)
    assert (machine.lanes(), machine.vector_registers) == (lanes, registers)
    assert machine.lanes(64) == lanes // 2


@pytest.mark.parametrize(
    "named", [{"mcpu": "sapphirerapids"}, {"mattr": ["+avx512f", "+avx512fp16"]}]
)
def test_processors_with_half_precision_have_a_larger_l1(named):
    usual = Microarchitecture.of(AVX512)
    machine = Microarchitecture.of(tvm.target.Target({"kind": "llvm", **named}))
    assert machine.l1_bytes == 48 << 10 > usual.l1_bytes


@pytest.mark.parametrize(
    ("features", "units"),
    [
        ("avx512bf16 avx512vbmi avx512vnni", 1),  # Zen 4
        ("avx512bf16 avx512vbmi avx512vnni avxvnni", 2),  # Zen 5
        ("avx512bf16 avx512vbmi avx512vnni avxvnni avx512fp16", 2),  # Xeons since Sapphire Rapids
        ("avx512bf16 avx512vnni", 2),  # Cooper Lake
        ("avx512vbmi avx512vnni", 2),  # Ice Lake
    ],
)
def test_units_that_registers_pass_through(features, units):
    mattr = ["+avx512f", *(f"+{name}" for name in features.split())]
    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64", "mattr": mattr})
    machine = Microarchitecture.of(target)
    assert machine.units == units
    assert machine.multiplies_pairs == ("bf16" in features)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"mcpu": "graniterapids"}, True),
        ({"mattr": ["+avx512f", "+avx512bf16", "+amx-bf16"]}, True),
        ({"mattr": ["+avx512f", "+avx512bf16"]}, False),
        ({"mcpu": "cooperlake"}, False),
    ],
)
def test_tiles_of_bfloat16(named, expected):
    machine = Microarchitecture.of(tvm.target.Target({"kind": "llvm", **named}))
    assert machine.multiplies_tiles == expected
    assert machine.multiplies_pairs


@pytest.mark.parametrize(("mcpu", "units"), [("znver4", 1), ("znver5", 2), ("znver3", 2)])
def test_units_of_models(mcpu, units):
    machine = Microarchitecture.of(tvm.target.Target({"kind": "llvm", "mcpu": mcpu}))
    assert machine.units == units
    arithmetic = machine.nanoseconds(1e9) * machine.lanes()
    assert arithmetic == pytest.approx(1e9 / (3 * units))


@pytest.mark.parametrize(
    ("named", "l1", "l2", "units"),
    [
        ({"mcpu": "generic"}, 32, 512, 2),
        ({"mcpu": "neoverse-n1"}, 64, 1024, 2),
        ({"mcpu": "neoverse-v1"}, 64, 1024, 4),
        ({"mcpu": "apple-m1"}, 128, 2048, 4),
        # The features in targets for these machines: Neoverse N1, V1, N2 and A64FX.
        ({"mattr": ["+dotprod", "+neon"]}, 64, 512, 2),
        ({"mattr": ["+bf16", "+i8mm", "+sve"]}, 64, 1024, 4),
        ({"mattr": ["+bf16", "+i8mm", "+sve", "+sve2"]}, 64, 1024, 2),
        ({"mattr": ["+sve"]}, 64, 1024, 2),
    ],
)
def test_caches_and_units_of_aarch64(named, l1, l2, units):
    target = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-unknown-linux-gnu", **named})
    machine = Microarchitecture.of(target)
    assert (machine.l1_bytes >> 10, machine.l2_bytes >> 10, machine.units) == (l1, l2, units)
    assert (machine.vector_bits, machine.vector_registers) == (128, 32)


@pytest.mark.parametrize(
    ("mcpu", "l1", "l2"),
    [("haswell", 32, 256), ("znver3", 32, 512), ("sapphirerapids", 48, 2048), ("x86-64", 32, 256)],
)
def test_named_processor_defines_the_caches(mcpu: str, l1: int, l2: int):
    machine = Microarchitecture.of(tvm.target.Target({"kind": "llvm", "mcpu": mcpu}))
    assert (machine.l1_bytes, machine.l2_bytes) == (l1 << 10, l2 << 10)


def test_a_target_may_say_how_many_cores_there_are():
    machines = [
        Microarchitecture.of(tvm.target.Target({"kind": "llvm", "mcpu": "znver3"} | cores))
        for cores in ({}, {"num-cores": 1}, {"num-cores": 12})
    ]
    assert [machine.cores for machine in machines] == [None, 1, 12]
    assert [machine.core_counts((2, 4)) for machine in machines] == [(2, 4), (1,), (12,)]
    assert [machine.worth_threads(1e9, 0) for machine in machines] == [True, False, True]
    assert not machines[2].worth_threads(1, 0)


@pytest.mark.parametrize(("target", "lanes", "registers"), MACHINES)
@pytest.mark.parametrize("rows", [1, 2, 7, 128, 1000])
@pytest.mark.parametrize("columns", [2, 17, 48, 1000])
def test_tiles_fit(target, lanes, registers, rows, columns):
    machine = Microarchitecture.of(target)
    tile = tiles.choose(rows, columns, machine)
    width = tiles.lanes_for(columns, machine, 32)
    assert tile.rows <= rows
    assert tile.columns % width == 0
    assert width <= lanes
    assert tile.rows * (tile.columns // width) < registers


@pytest.mark.parametrize(("target", "lanes", "registers"), MACHINES)
def test_large_products_use_the_registers(target, lanes, registers):
    tile = tiles.choose(512, 768, Microarchitecture.of(target))
    assert tile.rows * tile.columns // lanes >= registers // 2


def test_a_tile_divides_a_row_of_an_image_when_it_can():
    machine = Microarchitecture.of(AVX512)
    for width in (7, 14, 28, 56, 112):
        best = tiles.ranked_image(width, width, 64, machine)[0]
        assert width % best.across == 0
        assert not best.flat


def test_bits_of_types():
    assert [bits_of(t) for t in ("float32", "int64", "bfloat16", "bool")] == [32, 64, 16, 8]
