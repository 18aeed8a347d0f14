"""Functions of floats that kernels call."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax, tirx

from tests.compiler.kernels.kernels import AVX2, AVX512, NEON, SVE, build, random
from tests.compiler.programs import compiled, executed

NESTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "pow": lambda x: x.abs() ** 1.1,
    "softplus": torch.nn.functional.softplus,
    "elu": torch.nn.functional.elu,
    "fmod": lambda x: torch.fmod(x + 7, 5),
    "atan2": lambda x: torch.atan2(x, x + 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nested_functions_match_eager(dtype: torch.dtype):
    torch.manual_seed(0)
    x = torch.randn(37, dtype=dtype)  # vectors and a tail

    def each(x: torch.Tensor) -> dict[str, torch.Tensor]:
        results = {}
        for name, function in NESTED.items():
            y = x
            for _ in range(5):
                y = function(y)
            results[name] = y
        return results

    got, want = executed(compiled(each, x), each, x), each(x)
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def test_code_grows_by_the_number_of_calls():
    def of(times: int) -> str:
        def describe(builder, x):
            for _ in range(times):
                x = builder.emit(relax.op.tanh(relax.op.sigmoid(x)))
            return x

        kernel = build(describe, [random(64)]).lowered()["main"]
        bound: list[tirx.Let] = []
        tvm_ffi.structural_walk(kernel.body, (tirx.Let, bound.append))
        assert not bound
        return kernel.script()

    first, second, third = (len(of(times)) for times in (1, 3, 5))
    assert third - second < 1.5 * (second - first)


@pytest.mark.parametrize(
    ("target", "instruction"),
    [(AVX512, "vscalefps"), (AVX2, "vfmadd"), (NEON, "fmla"), (SVE, "fmla")],
)
def test_functions_are_vectors_of_the_target(target: tvm.target.Target, instruction: str):
    def describe(builder, x):
        for function in (relax.op.exp, relax.op.erf, relax.op.sin, relax.op.log, relax.op.sqrt):
            x = builder.emit(function(x))
        return x

    text = build(describe, [random(256)], target=target).assembly()
    assert instruction in text
    assert not re.search(r"tvmify_(exp|erf|sin|log)", text)  # all are inlined


def test_each_function_is_defined_once():
    def describe(builder, x):
        return builder.emit(relax.op.tanh(relax.op.exp(relax.op.tanh(x))))

    text = build(describe, [random(64)]).lowered()["main"].script(show_meta=True)
    names = [line for line in text.split("\\n") if "define linkonce_odr" in line]
    assert len(names) == len(set(names)) > 1
