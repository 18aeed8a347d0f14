"""Arithmetic, comparison, logic and activations, with NaN, infinities and every dtype."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.compiler.programs import check, check_each, compiled, executed, with_specials

UNARY = """abs acosh asinh atan ceil cos cosh erf exp exp2 expm1 floor isfinite isinf isnan log
log10 log1p log2 logical_not neg reciprocal relu round rsqrt sgn sigmoid sign sin sinh sqrt square
tan tanh trunc""".split()
ACTIVATIONS = """celu elu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6
selu silu softplus softshrink softsign tanhshrink""".split()
DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32, torch.uint8]


def test_functions_of_one_argument():
    check_each({name: getattr(torch, name) for name in UNARY}, with_specials(3, 64))


def test_functions_of_the_unit_interval():
    functions = {name: getattr(torch, name) for name in ("acos", "asin", "atanh")}
    check_each(functions, torch.rand(3, 64) * 0.9)


def test_activations():
    check_each({name: getattr(F, name) for name in ACTIVATIONS}, with_specials(3, 64) * 4)


def test_functions_within_each_other_are_compiled_in_reasonable_time():
    """Four nested functions took LLVM's code generation minutes, and more for each further one."""
    names = "sin cos tan exp tanh sigmoid".split()
    check_each(
        {"chain": lambda x: functools.reduce(lambda y, f: getattr(torch, f)(y), names, x)},
        torch.randn(3, 64),
    )


def test_gelu():
    # Without infinities, for which eager's float32 kernel gives NaN.
    functions = {"erf": F.gelu, "tanh": lambda x: F.gelu(x, approximate="tanh")}
    check_each(functions, torch.randn(3, 64) * 4)


def test_expm1_and_log1p_keep_their_digits_near_zero():
    check_each({"expm1": torch.expm1, "log1p": torch.log1p}, torch.randn(64) * 1e-4)


def test_functions_of_two_arguments():
    check_each(
        {
            "add": torch.add,
            "add_scaled": lambda x, y: torch.add(x, y, alpha=2),
            "rsub": lambda x, y: 3 - x,
            "sub": lambda x, y: torch.sub(x, y, alpha=0.5),
            "mul": torch.mul,
            "div": torch.div,
            "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
            "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
            "remainder": torch.remainder,
            "fmod": torch.fmod,
            "maximum": torch.maximum,
            "minimum": torch.minimum,
            "atan2": torch.atan2,
            "where": lambda x, y: torch.where(x > y, x, y),
            "lerp": lambda x, y: torch.lerp(x, y, 0.3),
        },
        with_specials(3, 64),
        with_specials(3, 64).flip(1).contiguous(),
    )


def test_adding_and_subtracting_a_large_number():
    """TVM's simplifier ignores rounding, infinity and NaN."""
    y = torch.full((64,), 1e8)
    x = with_specials(3, 64)
    check(lambda x: (x - x, x.abs() - x.abs(), (x * 2 + 1) - (x * 2 + 1), x - (x + 3)), x)
    check(lambda x, y: ((x + y) - y, y - (y - x), (x + 1e8) - 1e8), torch.rand(3, 64), y)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons(name: str):
    compare = getattr(torch, name)
    check_each(
        {
            "tensors": compare,
            "number": lambda x, y: compare(x, 0.5),
            "itself": lambda x, y: compare(x, x),
            "negated": lambda x, y: ~compare(x, y),
            "xor": lambda x, y: compare(x, y) ^ (x > 0),
        },
        with_specials(3, 64),
        with_specials(3, 64).flip(1).contiguous(),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_numbers_are_rounded_to_half_precision_except_as_factors(dtype: torch.dtype):
    functions = {
        "comparisons": lambda x: torch.stack([x == 0.7, x > 0.1, x <= 0.1, x != 257]),
        "remainders": lambda x: torch.stack([x % 0.7, torch.fmod(x, 0.1), 5.3 % x]),
        "sums": lambda x: torch.stack([x + 0.1, x - 0.7, 0.7 - x, x - torch.tensor(0.1)]),
        "factors and divisors": lambda x: torch.stack([x * 0.7, x / 0.7, x // 0.7]),
        "dividends": lambda x: torch.stack([0.7 // x, torch.tensor(0.7) / x]),
        "hardshrink": lambda x: F.hardshrink(x, 0.1),
    }
    for each in functions.values():
        x = torch.tensor([0.7, 0.1, 256, 7.3, 100], dtype=dtype)
        assert torch.equal(executed(compiled(each, x), each, x), each(x))


def test_thresholds_of_integers():
    x = torch.tensor([2**31 - 2, 3, 0, -(2**31)], dtype=torch.int32)
    for limit in (0.1, -0.5):
        function = lambda x, limit=limit: F.threshold(x, limit, -5.0)  # noqa: E731
        assert torch.equal(executed(compiled(function, x), function, x), function(x))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_numbers_that_an_integer_type_lacks_wrap_around(dtype: torch.dtype):
    x = torch.tensor([[0, 1, 44, 100], [3, 255, 7, 128]]).to(dtype)
    check_each(
        {
            "comparisons": lambda x: torch.stack([x > -1, x < 300, x == 256, x != -1, x >= 2**40]),
            "sums": lambda x: x + 300,
            "fill": lambda x: torch.full_like(x, -1),
            "factor": lambda x: torch.add(x, x, alpha=-3),
            "product": lambda x: torch.addmm(x, x[:, :2], x, alpha=-1, beta=-2),
            "scatter": lambda x: x.scatter(0, torch.tensor([[1, 0]]), -1),
            "constants": lambda x: torch.maximum(x, torch.tensor(-300)),
            "cast": lambda x: x.long() - torch.tensor(300).to(x.dtype),
        },
        x,
    )


def test_factors_and_numbers_of_booleans_count_as_true():
    x = torch.tensor([True, False, True])
    check_each(
        {
            "factor": lambda x: torch.add(x, x.flip(0), alpha=-1),
            "pad": lambda x: F.pad(x, (1, 2), value=-1),
        },
        x,
    )


def test_bounds_keep_nan():
    check_each(
        {
            "both": lambda x: x.clamp(-1, 1),
            "low": lambda x: x.clamp(min=0),
            "high": lambda x: x.clamp(max=0.5),
            "tensors": lambda x: x.clamp(x.abs() - 1, x.abs()),
            "relu_of_max": lambda x: torch.relu(torch.maximum(x, -x)),
        },
        with_specials(3, 64),
    )


def test_fmax_and_fmin_return_the_number_beside_a_nan():
    functions = {
        "fmax": torch.fmax,
        "fmin": torch.fmin,
        "itself": lambda x, y: torch.fmax(x, x),
        "sum": lambda x, y: torch.fmax(x, x + y),
        "difference": lambda x, y: torch.fmin(x - y, x),
        "zero": lambda x, y: torch.fmax(x, torch.tensor(0.0)),
        "nan": lambda x, y: torch.fmin(torch.tensor(float("nan")), y),
    }
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.5, -0.7])
    x, y = (each.contiguous() for each in torch.cartesian_prod(values, values).unbind(1))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        check_each(functions, x.to(dtype), y.to(dtype))


def test_fmax_and_fmin_of_integers_promote_and_broadcast_as_in_eager():
    whole = torch.tensor([torch.iinfo(torch.int64).min, -1, 0, 2**62 + 1, 2**62])
    numbers = with_specials(3, 37)
    check_each(
        {
            "int64": lambda i, x: torch.fmax(i, i.flip(0).unsqueeze(1)),
            "mixed": lambda i, x: torch.fmin(i.to(torch.int8), i.to(torch.uint8)),
            "bool": lambda i, x: torch.fmax(i > 0, x[:, :1] > 0),
            "with_bool": lambda i, x: torch.fmin(x > 0, x),
            "float": lambda i, x: torch.fmax(x[:, :5], i),
            "number": lambda i, x: torch.fmax(torch.tensor(0.7), i.half()),
        },
        whole,
        numbers,
    )


def test_a_zero_factor_keeps_nan():
    check_each(
        {
            "number": lambda x: x * 0,
            "constant": lambda x: x * torch.tensor(0.0),
            "zero_over_x": lambda x: 0 / x,
            "x_over_zero": lambda x: x / 0,
        },
        with_specials(3, 64),
    )


@pytest.mark.parametrize("exponent", [2, 3, 4, 0.5, -0.5, -1, 1.7, 0, -2])
def test_powers(exponent: float):
    check(lambda x: x.abs() ** exponent, with_specials(64))


def test_large_tensors_of_one_value():
    values = (float("-inf"), float("nan"), 2.0)
    size = (600, 600)  # too large to be folded into a constant
    check_each({str(v): lambda x, v=v: x + x.new_full(size, v) for v in values}, torch.ones(1))


def test_powers_of_tensors():
    check_each(
        {"tensors": torch.pow, "number": lambda x, y: torch.pow(2.0, y)},
        torch.rand(64),
        torch.randn(64),
    )


def test_booleans_and_integers_promote_as_in_eager():
    flags = torch.rand(3, 16) > 0.5
    whole = torch.randint(-5, 6, (3, 16))
    check_each(
        {
            "add_flags": lambda b, i, x: b + (i > 0),
            "mul_flags": lambda b, i, x: b * (i > 0),
            "flag_float": lambda b, i, x: b * x,
            "int_float": lambda b, i, x: i + x,
            "int_number": lambda b, i, x: i + 2.5,
            "true_div": lambda b, i, x: i / 3,
            "floor_div": lambda b, i, x: i // 3,
            "floor_div_negative": lambda b, i, x: i // -3,
            "floor_div_float": lambda b, i, x: i // 2.5,
            "trunc_div": lambda b, i, x: torch.div(i, 3, rounding_mode="trunc"),
            "remainder": lambda b, i, x: i % -3,
            "fmod": lambda b, i, x: torch.fmod(i, 3),
            "bits": lambda b, i, x: (i & 6) | (i ^ 3),
            "not": lambda b, i, x: (~i, ~b),
            "logic": lambda b, i, x: torch.logical_xor(b, i) | torch.logical_and(i, x),
            "clamp": lambda b, i, x: i.clamp(-1, 2),
            "square": lambda b, i, x: i**2,
            "where": lambda b, i, x: torch.where(b, i, x + 1),
            "round": lambda b, i, x: i.round(),
            "sqrt": lambda b, i, x: torch.sqrt(i.abs()),
        },
        flags,
        whole,
        torch.randn(3, 16),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype):
    check_each(
        {
            "to": lambda x, y: x.to(dtype),
            "from": lambda x, y: y.float(),
            "add": lambda x, y: y + y,
            "mix": lambda x, y: x * y,
            "exp": lambda x, y: torch.exp(y * 0.5),
            "relu": lambda x, y: torch.relu(y),
            "zero_dim": lambda x, y: y * torch.tensor(2, dtype=dtype),
        },
        torch.rand(3, 32) * 5,
        torch.randint(0, 5, (3, 32)).to(dtype),
    )


def test_double_precision_functions_are_doubly_precise():
    names = ("erf", "tanh", "exp", "sigmoid", "log1p", "sinh", "cos")
    check_each(
        {name: getattr(torch, name) for name in names}, torch.randn(3, 32, dtype=torch.float64)
    )


@pytest.mark.parametrize("shapes", [((4, 1, 3), (5, 1)), ((), (3,)), ((), ()), ((0, 3), (1, 3))])
def test_broadcasting(shapes: tuple[tuple[int, ...], ...]):
    check(lambda x, y: x + y, *(torch.randn(shape) for shape in shapes))


def test_a_division_by_zero_raises_as_in_eager():
    ones, zeros = torch.tensor([1, 2]), torch.tensor([0, 1])
    artifact = compiled(lambda x, y: x // y, ones, zeros)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        executed(artifact, lambda x, y: x // y, ones, zeros)
    assert executed(artifact, lambda x, y: x // y, ones, ones).tolist() == [1, 1]


def test_remainders_of_known_divisors():
    check(lambda x: x % torch.tensor([3, -2]), torch.arange(-4, 4).view(4, 2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_scaled_differences_of_integers_wrap_around(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 100, 127]).to(dtype)
    artifact = check(lambda x: torch.sub(x, x, alpha=3), x)
    assert torch.equal(executed(artifact, lambda x: torch.sub(x, x, alpha=3), x), x - x * 3)


def test_hardswish_of_large_numbers_is_infinite() -> None:
    check(F.hardswish, torch.tensor([3e38, 1e38, 1e37, -3e38]))
