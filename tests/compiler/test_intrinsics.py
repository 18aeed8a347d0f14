"""Vectorised functions against float64, over every exponent and at every special value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from tvm import te, tirx

from tests.compiler.schedule.kernels import NATIVE, TARGETS, widest_vector
from tvmify.compiler.schedule import schedule

_REFERENCES = {
    "exp": torch.exp,
    "log": torch.log,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "rsqrt": torch.rsqrt,
}
_SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-45, -1e-45, 1.2e-38, 3.4e38, -3.4e38]
#: Where exp overflows, becomes denormal and becomes zero; where tanh and erf change method.
_EDGES = [88.7228, 88.73, -87.33, -87.4, -103.97, -104.1, 0.625, 0.62499994, 0.9277344, 4.0, 10.0]


def _run(function, x, target):
    a = te.placeholder(x.shape, str(x.dtype), name="a")
    result = te.compute(x.shape, lambda i: function(a[i]), name="result")
    ir_mod, _ = schedule(tvm.IRModule({"main": te.create_prim_func([a, result])}), target)
    assert widest_vector(ir_mod["main"]) > 1
    out = tvm.runtime.tensor(np.zeros_like(x))
    tvm.compile(ir_mod, target=target)["main"](tvm.runtime.tensor(x), out)
    return out.numpy()


def _arguments():
    generator = np.random.default_rng(0)
    every_exponent = np.arange(0, 2**32, 65521, dtype=np.uint64).astype(np.uint32).view("float32")
    usual = generator.standard_normal(50_000) * generator.choice([1e-3, 1, 20], 50_000)
    near_one = 1 + generator.standard_normal(10_000) * 1e-3
    edges = [sign * edge for edge in _EDGES for sign in (1, -1)]
    rest = np.concatenate([_SPECIAL, edges, usual, near_one]).astype("float32")
    return np.concatenate([rest, every_exponent])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", sorted(_REFERENCES))
def test_two_units_in_the_last_place(name, target):
    x = _arguments()
    actual = _run(getattr(tirx, name), x, target)
    exact = _REFERENCES[name](torch.from_numpy(x).double()).numpy()
    with np.errstate(all="ignore"):
        rounded = exact.astype("float32")
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(rounded))
    same = (actual == rounded) | np.isnan(rounded)
    np.testing.assert_array_equal(np.isinf(actual)[~same], False)
    unit = np.spacing(np.maximum(np.abs(rounded[~same]), np.finfo("float32").tiny))
    assert np.max(np.abs(actual[~same].astype("float64") - exact[~same]) / unit) < 2.5


def test_signs_of_zero_are_kept():
    zeros = np.array([0.0, -0.0], "float32")
    for name in ("tanh", "erf"):
        result = _run(getattr(tirx, name), np.tile(zeros, 8), NATIVE)
        np.testing.assert_array_equal(np.signbit(result), np.tile([False, True], 8))


def test_other_types_keep_their_lowering():
    x = np.random.default_rng(0).standard_normal(40)
    np.testing.assert_allclose(_run(tirx.exp, x, NATIVE), np.exp(x), rtol=1e-14)
