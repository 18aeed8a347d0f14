from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tvm import te, tirx

from benchmarks import structure
from benchmarks.shapes import Shape
from tvmify.compiler.microarchitecture import Microarchitecture

SHAPE = Shape(8, 32, 64)


def _kernel(name: str, scale: float, function: Callable[..., Any] = te.exp) -> tirx.PrimFunc:
    x = te.placeholder((16,), name=f"{name}_in")
    y = te.compute((16,), lambda i: function(x[i] * scale), name=name)
    made = te.create_prim_func([x, y]).with_attr("global_symbol", name)
    assert isinstance(made, tirx.PrimFunc)
    return made


def test_names_are_not_hashed():
    assert structure.digest(_kernel("f", 2.0)) == structure.digest(_kernel("g", 2.0))


@pytest.mark.parametrize("changed", [(3.0, te.exp), (2.0, te.log)])
def test_numbers_and_operators_are_hashed(changed: tuple[float, Callable[..., Any]]):
    assert structure.digest(_kernel("f", 2.0)) != structure.digest(_kernel("f", *changed))


def _record() -> structure.Record:
    return structure.record({"product": lambda: structure._of_shape(SHAPE)})


def test_changed_plan_number_is_detected(monkeypatch: pytest.MonkeyPatch):
    before = _record()
    assert not structure.differences(before, _record())
    of = Microarchitecture.of
    monkeypatch.setattr(
        Microarchitecture,
        "of",
        classmethod(lambda _, target: dataclasses.replace(of(target), vector_registers=8)),
    )
    found = structure.differences(before, _record())
    assert {line.split()[0] for line in found} == set(structure.TARGETS)


def test_the_order_and_names_of_functions_are_not_compared():
    one = {"avx2": {"net": ["matmul 0a matmul", "matmul 0b matmul1"]}}
    two = {"avx2": {"net": ["matmul 0a matmul1", "matmul 0b matmul"], "other": []}}
    assert not structure.differences(one, two)


def test_missing_function_or_changed_rule_is_detected():
    one = {"avx2": {"net": ["matmul 0a f", "matmul 0a g"]}}
    assert structure.differences(one, {"avx2": {"net": ["matmul 0a f"]}})
    assert structure.differences(one, {"avx2": {"net": ["matmul 0a f", "elementwise 0a g"]}})


def test_comparison_fails_on_disjoint_or_different_records(tmp_path: Path):
    def compare(one: structure.Record, two: structure.Record) -> int:
        paths = []
        for name, content in (("one", one), ("two", two)):
            paths.append(tmp_path / name)
            paths[-1].write_text(json.dumps(content))
        command = [sys.executable, "-m", "benchmarks.structure", "compare", *map(str, paths)]
        return subprocess.run(command, check=False, capture_output=True).returncode

    one: structure.Record = {"avx2": {"net": ["matmul 0a f"]}}
    assert compare(one, one) == 0
    assert compare(one, {"avx2": {"net": ["matmul 0b f"]}}) == 1
    assert compare(one, {"avx2": {"other": ["matmul 0a f"]}}) == 1
