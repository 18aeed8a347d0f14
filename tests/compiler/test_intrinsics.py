"""Vectorized functions against float64, over every exponent and at every special value."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
from tvm import te, tirx

from tests.compiler.kernels.kernels import NATIVE, TARGETS, executable, widest_vector
from tests.compiler.programs import compiled, executed
from tvmify.compiler.kernels.elementwise import scalar
from tvmify.compiler.pipeline import schedule

_NAMES = """acos acosh asin asinh atan atanh cos cosh erf exp exp2 expm1 log log10 log1p log2 rsqrt
sigmoid sin sinh tan tanh""".split()
#: Odd functions, whose value at -0 is -0.
_ODD = "asin asinh atan atanh erf expm1 log1p sin sinh tan tanh".split()
_SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-45, -1e-45, 1.2e-38, 3.4e38, -3.4e38]
#: Where exp overflows, becomes denormal and becomes zero; where functions change method.
_EDGES = [
    88.7228,
    88.73,
    -87.33,
    -87.4,
    -103.97,
    -104.0,
    -104.1,
    -150.6,
    -151.1,
    -1e9,
    0.5,
    2 / 3,
    3.95,
    4.0,
    10.0,
    65536,
    65537,
]


def _function(name):
    return scalar.expm1 if name == "expm1" else getattr(tirx, name)


def _run(function, target, *inputs):
    """Run a function of scalars on vectors."""
    placeholders = [
        te.placeholder(x.shape, str(x.dtype), name=f"x{i}") for i, x in enumerate(inputs)
    ]
    result = te.compute(inputs[0].shape, lambda i: function(*(p(i) for p in placeholders)))
    program = te.create_prim_func([*placeholders, result])
    ir_mod, _ = schedule(tvm.IRModule({"main": program}), target)
    assert widest_vector(ir_mod["main"]) > 1
    out = tvm.runtime.tensor(np.zeros_like(inputs[0]))
    executable(ir_mod["main"], target)(*(tvm.runtime.tensor(x) for x in inputs), out)
    return out.numpy()


def _arguments():
    generator = np.random.default_rng(0)
    every_exponent = np.arange(0, 2**32, 65521, dtype=np.uint64).astype(np.uint32).view("float32")
    usual = generator.standard_normal(50_000) * generator.choice([1e-3, 1, 20], 50_000)
    unit_interval = generator.random(20_000) * 2 - 1
    zeros_of_sine = np.arange(-2000, 2000) * np.pi / 2
    near_one = 1 + generator.standard_normal(10_000) * 1e-3
    edges = [sign * edge for edge in _EDGES for sign in (1, -1)]
    rest = np.concatenate([_SPECIAL, edges, usual, unit_interval, zeros_of_sine, near_one]).astype(
        "float32"
    )
    return np.concatenate([rest, every_exponent])


def _assert_two_units(actual, exact):
    """NaN, infinities and signs of zero are exact; other errors are two units and a rounding.

    `exact` has more digits than `actual`.
    """
    with np.errstate(all="ignore"):
        rounded = exact.astype(actual.dtype)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(rounded))
    same = (actual == rounded) | np.isnan(rounded)
    np.testing.assert_array_equal(np.isinf(actual)[~same], False)
    zero = (actual == 0) & (rounded == 0)
    np.testing.assert_array_equal(np.signbit(actual[zero]), np.signbit(rounded[zero]))
    unit = np.spacing(np.maximum(np.abs(rounded[~same]), np.finfo(actual.dtype).tiny))
    with np.errstate(all="ignore"):
        error = np.abs(actual[~same].astype(exact.dtype) - exact[~same]) / unit
    assert np.max(error, initial=0.0) < 2.5


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", _NAMES)
def test_two_units_in_the_last_place(name, target):
    x = _arguments()
    exact = getattr(torch, name)(torch.from_numpy(x).double()).numpy()
    _assert_two_units(_run(_function(name), target, x), exact)


@pytest.mark.skipif(np.finfo("longdouble").nmant < 63, reason="long double has no more digits")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", _NAMES)
def test_two_units_in_the_last_place_of_float64(name, target):
    generator = np.random.default_rng(3)
    every_exponent = generator.integers(0, 2**64, 20_000, dtype=np.uint64).view("float64")
    usual = generator.standard_normal(20_000) * generator.choice([1e-3, 1, 20, 300], 20_000)
    zeros_of_sine = np.arange(-2000, 2000) * np.pi / 2
    edges = [*_EDGES, 709.78, 709.8, 708.4, 745.13, 745.14, 745.2, 750.0, 1074.0, 1075.0, 1024.0]
    near_one = 1 + usual[::2] * 1e-3
    edges += [-edge for edge in edges]
    x = np.concatenate([_SPECIAL, edges, usual, zeros_of_sine, near_one, every_exponent])
    _assert_two_units(_run(_function(name), target, x), _exact(name, x))


@pytest.mark.skipif(np.finfo("longdouble").nmant < 63, reason="long double has no more digits")
@pytest.mark.parametrize("target", TARGETS)
def test_atan2_of_float64(target):
    generator = np.random.default_rng(4)
    usual = generator.standard_normal((2, 20_000)) * generator.choice([1e-9, 1, 1e9], (2, 20_000))
    pairs = np.array([(a, b) for a in _SPECIAL for b in [*_SPECIAL, 1e-308, 1.7e308]]).T
    y, x = np.concatenate([usual, pairs], axis=1)
    with np.errstate(all="ignore"):
        exact = np.arctan2(y.astype("longdouble"), x.astype("longdouble"))
    _assert_two_units(_run(tirx.atan2, target, y, x), exact)


def _exact(name, x):
    """Return a function of float64 with the digits of long double."""
    names = {"acos": "arccos", "asin": "arcsin", "atan": "arctan"}
    names |= {f"{name}h": f"{names[name]}h" for name in names}
    with np.errstate(all="ignore"):
        wide = x.astype("longdouble")
        if name == "sigmoid":
            return 1 / (1 + np.exp(-wide))
        if name == "rsqrt":
            return 1 / np.sqrt(wide)
        if name == "erf":
            return np.array([_exact_erf(value) for value in x])
        return getattr(np, names.get(name, name))(wide)


def _exact_erf(value):
    if not np.isfinite(value) or value == 0:
        return np.longdouble(np.sign(value) if np.isinf(value) else value)
    return np.longdouble(mpmath.nstr(mpmath.erf(mpmath.mpf(value)), 25))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["pow", "atan2"])
def test_functions_of_two_arguments(name, target):
    generator = np.random.default_rng(1)
    x, y = generator.permutation(_arguments()), generator.permutation(_arguments())
    usual = slice(0, len(x) // 2)
    with np.errstate(all="ignore"):
        x[usual] = np.abs(x[usual]) ** 0.25
    y[::5] = np.round(generator.standard_normal(len(y[::5])) * 5)  # whole exponents
    pairs = np.array([(a, b) for a in _SPECIAL for b in [*_SPECIAL, 2.0, 3.0, 0.5]], "float32")
    x, y = np.concatenate([x, pairs[:, 0]]), np.concatenate([y, pairs[:, 1]])
    exact = getattr(torch, name)(torch.from_numpy(x).double(), torch.from_numpy(y).double())
    _assert_two_units(_run(_function(name), target, x, y), exact.numpy())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_remainders_are_exact(dtype, target):
    """For any two numbers, and for quotients just below, at or above an integer."""
    generator = np.random.default_rng(2)
    x, y = generator.permutation(_arguments()), generator.permutation(_arguments())
    divisors = generator.standard_normal(10_000).astype(dtype)
    multiples = divisors * np.round(2.0 ** generator.uniform(0, 26, 10_000)).astype(dtype)
    near = [np.nextafter(multiples, bound) for bound in (-np.inf, np.inf)]
    pairs = np.array([(a, b) for a in _SPECIAL for b in _SPECIAL])
    with np.errstate(all="ignore"):
        x = np.concatenate([x, multiples, *near, pairs[:, 0]]).astype(dtype)
        y = np.concatenate([y, divisors, divisors, divisors, pairs[:, 1]]).astype(dtype)
        exact = np.fmod(x, y)
    actual = _run(scalar.fmod, target, x, y)
    np.testing.assert_array_equal(actual, exact)
    np.testing.assert_array_equal(np.signbit(actual[exact == 0]), np.signbit(exact[exact == 0]))


def test_a_result_may_be_read_twice():
    def clamped(x):
        y = tirx.exp2(x)
        return tirx.Select(y > tirx.const(1.5, "float32"), tirx.const(1.5, "float32"), y)

    x = np.linspace(-4, 4, 32, dtype="float32")
    once = _run(tirx.exp2, NATIVE, x)
    np.testing.assert_array_equal(_run(clamped, NATIVE, x), np.where(once > 1.5, 1.5, once))


@pytest.mark.parametrize("name", _ODD)
def test_signs_of_zero_are_kept(name):
    zeros = np.tile(np.array([0.0, -0.0], "float32"), 8)
    result = _run(_function(name), NATIVE, zeros)
    np.testing.assert_array_equal(np.signbit(result), np.signbit(zeros))


def test_huge_argument_does_not_affect_neighbours():
    """The C library computes one lane; the others of its vector are the same as without it."""
    x = np.linspace(-5, 5, 32).astype("float32")
    x[3] = 1e10
    np.testing.assert_allclose(_run(tirx.sin, NATIVE, x), np.sin(x.astype("float64")), atol=1e-6)


def test_other_types_keep_their_lowering():
    x = np.random.default_rng(0).standard_normal(40)
    for name in ("exp", "expm1", "erf", "log1p"):
        exact = getattr(torch, name)(torch.from_numpy(np.abs(x))).numpy()
        np.testing.assert_allclose(_run(_function(name), NATIVE, np.abs(x)), exact, rtol=1e-13)


def test_functions_of_float64_keep_their_digits_and_signs_near_zero():
    names = "tanh expm1 log1p sinh erf tan asinh atan asin atanh sigmoid".split()
    functions = {name: getattr(torch, name) for name in names}
    functions |= {name: getattr(F, name) for name in "elu selu celu gelu silu mish".split()}
    small = torch.logspace(-300, -0.01, 150, dtype=torch.float64)
    x = torch.cat([small, -small, torch.tensor([0.0, -0.0], dtype=torch.float64)])

    def each(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: function(x) for name, function in functions.items()}

    got, want = executed(compiled(each, x), each, x), each(x)
    for name, expected in want.items():
        # Both are right to a few units in the last place.
        torch.testing.assert_close(got[name], expected, rtol=2e-15, atol=0.0, msg=name)
        assert torch.equal(torch.signbit(got[name]), torch.signbit(expected)), name
