"""Plain code between regions is transcribed to Python: its values are Python's."""

from __future__ import annotations

import itertools
import linecache
import math
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tvmify.capture import drive
from tvmify.errors import CaptureError

pytestmark = pytest.mark.usefixtures("inference")

_SOURCE = """
import math
from typing import Dict, List
import torch
from torch import Tensor

def program(x: Tensor, integers: Tensor, floats: Tensor):
    y = torch.tanh(x) * 2 + 1
    if bool(y.sum() > 100):
        y = torch.sin(y) * 3 - 1
    n, m = int(integers[0]), int(integers[1])
    v, w = float(floats[0]), floats[1].item()
    s = ["ab", "", " a b\\r\\n", "1e3", "é,b,a", "12"][m % 6]
{statements}
    return y, {expression}
"""


def _program(folder: Path, code: str) -> Any:
    """Return a function that branches on values, then runs this code and returns its last value."""
    *statements, expression = code.split("; ")
    lines = "".join(f"    {line}\n" for line in statements)
    source = _SOURCE.format(statements=lines, expression=expression)
    path = folder / "program.py"  # TorchScript reads the source
    path.write_text(source)
    linecache.checkcache(str(path))
    module: Any = types.ModuleType("program_of_numbers")
    sys.modules[module.__name__] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module.program


_INTEGERS = [(7, 3), (-7, 3), (7, 0), (-(2**63), -1), (2**62, 4), (0, -2), (-9, 64), (63, 63)]
_FLOATS = [(0.5, 2.0), (-1.0, 0.0), (1.0, 0.1), (math.inf, 1.0), (math.nan, -0.0), (1e308, 10.0)]

#: Evaluated for each pair of integers.
_OF_INTEGERS = """n % m|n // m|n / m|n ** m|n * n * n|n << 70|n << m|n >> m|-n|abs(n)|divmod(n, m)
math.sqrt(n)|math.log(n)|math.factorial(m)|math.gcd(n, m)|round(n / 7)|float(n) ** m|n ^ m|~m
int(v * n)|str(n) + s|f"{n}-{m}"|"%d" % n|n < m < 5|min(n, 2.5)|max(n, m, 3)|hex(n)|bin(m)|chr(m)
[1, 2, 3][n]|[1, 2, 3][m:n]|s[n]|s[m:]|len(range(n, m))|sum([n, m])|bool(n) + 1|n == 2.0
math.pow(n, m)|x.shape|x.shape[0] * n|torch.tensor([m]) * (n ** 2)|torch.arange(3) * (m / 1)
n %= m; n|n -= m; n|n **= 2; n|h = 7; h = h * n; h % 1000
h = 9223372036854775807; h = h + 1; h * m|z = 0; n % z
x.shape == (4,)|x.shape != (n,)|(4, 4) == x.size()|x.size() == x.shape
5 % 0|z = 0; 7 // z|2 ** 64 * n|(-7) // 2|round(2.5) + n|9223372036854775807 + 1
2 ** -1 + n|h = 2; for i in range(70): h = h * 3; h""".splitlines()
#: Evaluated for each pair of floats.
_OF_FLOATS = """v / w|v // w|v % w|v ** w|math.sqrt(v)|math.log(w)|math.exp(v * 800)|math.fmod(v, w)
int(v)|round(v)|round(w, 1)|math.floor(v)|math.ceil(w)|f"{v}"|str(v) + str(w)|v < w < 1|min(v, w)
max(1, v)|divmod(v, w)|math.atan2(w, v)|math.copysign(1.0, w)|v == v|sorted([v, w])|-w|math.acos(v)
f"{3.0}"|str(1e20)|math.sqrt(-1.0)|0.0 / 1.0 * w|1.0 // 0.1|bool(w)|math.tan(v)|math.lgamma(w)
math.isclose(v, w)|math.trunc(v)|v > 0 and w > 0|int(1e300)
float("inf") * w|float("x")""".splitlines()
#: Evaluated for each string.
_OF_STRINGS = """len(s)|s.upper()|s.find("b")|s.find("b", 1)|s.split()|s.rsplit()|s.split(",")
s.strip()|s.startswith("a")|s.endswith("b", 0, 2)|s.rsplit(",", 1)|s.replace("a", "é")|s[::-1]
s * 2|s[-1]|int(s)|float(s)|s.count("a")|s.index("b")|s.title()|"a" in s|s < "b"
[s, "é"]|len("é")|"é"[0] + s|s.zfill(9)|s.isdigit()|"{}:{}".format(s, 3.0)|"%s" % 3.0
s.splitlines()|s.lstrip("a")
s.join(["1", "2"])|ord(s)|s.rfind("b", 0, -1)|s.find("b", 0, -1)|s.center(9)|s.partition(",")
d = {s: 1, "k": 2}; list(d.keys())""".splitlines()


def _each(rows: list[str]) -> list[str]:
    return [code for row in rows for code in row.split("|")]


#: Code that TorchScript cannot compile, or would compile to something else.
_REFUSED = _each(
    """~m|len(range(n, m))|n %= m; n|n **= 2; n|round(w, 1)|math.isclose(v, w)|math.trunc(v)
s.endswith("b", 0, 2)|s * 2|s.rfind("b", 0, -1)|s.find("b", 0, -1)|s.center(9)""".splitlines()
)


def _outcome(run: Any, call: tuple[Tensor, ...]) -> str:
    try:
        value = run(*call)[1]
    except Exception:  # eager then runs the call again, and raises its own error
        return "raises"
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.tolist()!r}"
    return f"{type(value)} {value!r}"


@pytest.mark.parametrize("code", _each(_OF_INTEGERS + _OF_FLOATS + _OF_STRINGS))
def test_values_match_python(tmp_path: Path, code: str) -> None:
    function = _program(tmp_path, code)
    calls: dict[int, Any] = {}
    numbers = itertools.count().__next__
    try:
        driver = drive(function, numbers, lambda i, x, n, f: calls[i](*x, *n, *f))
    except CaptureError:
        assert code in _REFUSED
        return
    assert code not in _REFUSED
    calls |= {number: part.in_eager for number, part in driver.parts.items()}
    pairs = _INTEGERS if code in _each(_OF_INTEGERS) else [(7, i) for i in range(6)]
    for i, integers in enumerate(pairs):
        floats = _FLOATS[i % len(_FLOATS)]
        call = torch.zeros(4), torch.tensor(integers), torch.tensor(floats, dtype=torch.float64)
        driven = _outcome(lambda *x: driver.run(driver.bound(x, {})), call)
        assert driven == _outcome(function, call), (integers, floats)


def _dies_early(x: Tensor) -> Tensor:
    for _ in range(4):
        y = torch.exp(x) * 2 + 1
        z = torch.sin(y) * 3 - 1
        if bool(z.sum() > 1e9):
            break
        x = torch.cos(z) * 2 + 1
    return x


def test_tensors_are_freed_after_last_use() -> None:
    alive: list[int] = []
    references: list[weakref.ref[Tensor]] = []
    calls: dict[int, Any] = {}

    def call(number: int, tensors: list[Tensor], *numbers: Any) -> list[Tensor]:
        alive.append(sum(reference() is not None for reference in references))
        results = calls[number](*tensors, *numbers[0], *numbers[1])
        references.extend(map(weakref.ref, results))
        return results

    driver = drive(_dies_early, itertools.count().__next__, call)
    calls |= {number: part.in_eager for number, part in driver.parts.items()}
    driver.run(driver.bound((torch.zeros(4),), {}))
    assert max(alive) <= 2


def _grows(x: Tensor) -> Tensor:
    sizes = [1, 2]
    y = torch.exp(x).sin().cos()
    for size in sizes:
        if len(sizes) < 4 and bool(y.sum() > 0):
            sizes.append(size)
    return y * len(sizes)


def _tells_a_dtype(x: Tensor) -> tuple[Tensor, str]:
    y = torch.exp(x).sin().cos()
    return (y if bool(y.sum() > 0) else -y), f"{x.dtype}"


@pytest.mark.parametrize("function", [_grows, _tells_a_dtype])
def test_inexpressible_torchscript_is_refused(function: Any) -> None:
    with pytest.raises(CaptureError, match=r"iterated over|converted to text"):
        drive(function, itertools.count().__next__, lambda *_: [])


class _Numbers(torch.nn.Module):
    __annotations__ = {"factor": float}

    def __init__(self) -> None:
        super().__init__()
        self.factor = 3  # TorchScript would have 3.0

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        y = torch.exp(x).sin().cos()
        return (y if bool(y.sum() > 0) else -y), f"{self.factor}"


def test_attributes_are_those_of_the_module() -> None:
    net, calls = _Numbers(), {}
    driver = drive(net, itertools.count().__next__, lambda i, x, n, f: calls[i](*x, *n, *f))
    calls |= {number: part.in_eager for number, part in driver.parts.items()}
    driver.bind(net)
    assert driver.run(driver.bound((torch.zeros(4),), {}))[1] == "3"


class _HoldsTorchScript(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(torch.nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(torch.exp(x).sin().cos())
        return y if bool(y.sum() > 0) else -y


def test_rules_are_not_mixed() -> None:
    with pytest.raises(CaptureError, match="follow Python"):
        drive(_HoldsTorchScript(), itertools.count().__next__, lambda *_: [])
