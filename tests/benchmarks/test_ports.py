"""The loops that llvm-mca analyzes, and how its output is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import ports
from benchmarks.shapes import Shape

PRODUCT = """.LBB0_2:
\tldp\tq2, q3, [x0], #32
\tldr\ts4, [x1], #4
\tfmla\tv0.4s, v2.4s, v4.s[0]
\tfmla\tv1.4s, v3.4s, v4.s[0]
\tsubs\tx2, x2, #1
\tb.ne\t.LBB0_2
"""
#: The sum starts with a loaded value, so that no sum is carried.
TRANSFORM = """.LBB0_1:
\tldp\tq2, q3, [x0], #32
\tfmla\tv2.4s, v3.4s, v4.4s
\tfmla\tv3.4s, v2.4s, v4.4s
\tfmla\tv3.4s, v2.4s, v5.4s
\tstr\tq3, [x1], #16
\tcbnz\tx2, .LBB0_1
"""
#: Its branch goes to another label: no loop.
BLOCK = ".LBB0_3:\n" + "\tfmla\tv7.4s, v2.4s, v4.s[0]\n" * 9 + "\tb.ne\t.LBB0_1\n"


def test_the_busiest_loop_carries_on_most_sums():
    loop = ports.busiest(f"f:\n{TRANSFORM}{PRODUCT}{BLOCK}\tret\n", "matmul")
    assert loop == ports.Loop("matmul", PRODUCT)
    assert loop.multiply_adds == 2


def test_a_kernel_without_such_a_loop_is_an_error():
    with pytest.raises(ValueError, match="no loop of elementwise adds products"):
        ports.busiest(f"f:\n{TRANSFORM}{BLOCK}", "elementwise")


@pytest.mark.parametrize("cpu", ports.UNITS)
def test_a_product_keeps_its_sums_in_registers(cpu: str):
    loop = ports.loop_of(Shape(16, 64, 48), cpu)
    assert loop.rule == "matmul"
    assert loop.multiply_adds >= 16
    assert "[sp" not in loop.text


def test_cycles_are_per_iteration(tmp_path: Path):
    mca = tmp_path / "mca"
    mca.write_text("#!/bin/sh\ncat >/dev/null\necho 'Total Cycles:      250'\n")
    mca.chmod(0o755)
    assert ports.cycles(ports.Loop("matmul", PRODUCT), "neoverse-n1", str(mca)) == 2.5


def test_llvm_mca_errors_are_reported(tmp_path: Path):
    mca = tmp_path / "mca"
    mca.write_text("#!/bin/sh\ncat >/dev/null\necho 'unknown processor' >&2\nexit 1\n")
    mca.chmod(0o755)
    with pytest.raises(SystemExit, match="fails for neoverse-n1: unknown processor"):
        ports.cycles(ports.Loop("matmul", PRODUCT), "neoverse-n1", str(mca))
