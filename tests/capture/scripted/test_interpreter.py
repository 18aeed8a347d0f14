"""The interpreter's own operators compute the same as TorchScript's."""

import math  # noqa: F401  (TorchScript finds it here)
from typing import Any, Optional  # noqa: F401

import pytest
import torch
from torch import Tensor  # noqa: F401

from tvmify.capture.scripted.interpreter import Interpreter, source_line
from tvmify.capture.scripted.operators import find_operator
from tvmify.capture.scripted.primitives import PREFERRED, PRIMITIVES
from tvmify.capture.values import DTYPES

EXPRESSIONS = """
n // 3
-n // 3
n % -3
n / 4
f // 0.3
f % 0.3
n ** 2
n ** -1
f ** 2
2.0 ** n
abs(-n) + abs(-f)
round(f * 10)
round(n)
int(f * 3) + int(True) + int('12')
float(n) + float('1.5') + float(True)
bool(n) and not bool(f > 100)
min(n, 3) + max(f, 2.0) + min([3, 1, 2]) + max([3, 1, 2])
math.floor(f) + math.ceil(f) + math.sqrt(n) + math.log(f) + math.exp(f) + math.log(f, 2)
math.sin(f) + math.atan2(f, 2.0) + math.fmod(f, 0.2) + math.copysign(f, -1.0) + math.pow(n, 2)
math.isnan(f) or math.isinf(f) or math.gcd(n, 14) == 7
n & 3 | 8 ^ 1 << 2 >> 1
divmod(n, 3)
divmod(f, 0.3)
n < 3 or n >= 7 and n != 8 and f <= 2
n == 7 and f == 1.25 and 'a' == 'a' and [1, 2] == [1, 2] and 'a' != 'b'
[1, 2, 3][1:] + [4] * 2 + [n]
[1, 2, 3][-1] + [1, 2, 3].index(2) + [1, 2, 2].count(2)
[i * 2 for i in range(n)]
[i for i in range(10, n, -2)]
list(range(2, n, 3))
sorted([3, 1, 2])
sum([1, 2, n]) + len([1, 2]) + len('abc') + len({'a': 1})
any([False, n > 3]) and all([True, n > 3])
2 in [1, 2] and 'k' in {'k': 1} and 'bc' in 'abcd'
{'a': n, 'b': 2}.get('c', 5) + {'a': n}['a']
list({'a': n, 'b': 2}.keys())
list({'a': n, 'b': 2}.values())
list({'a': n, 'b': 2}.items())
'a,b'.split(',') + ['x'.upper() + 'Y'.lower() + ' z '.strip()]
'{}-{}'.format(n, 'x') + str(n) + '-'.join(['a', 'b']) + 'abc'[1] + 'abcdef'[1:4]
'abc'.startswith('ab') and 'abc'.endswith('bc') and not 'abc'.startswith('b')
'aXbX'.replace('X', 'y') + 'abc'.title() + 'abc'.capitalize()
'abcabc'.find('ca') + 'abcabc'.rfind('b') + ord('a')
'%s %d' % ('a', n)
x.dim() + x.numel() + x.size(1) + x.size()[0] + x.stride(0) + len(x) + x.element_size()
x.shape
x.stride()
x.dtype == torch.float32 and x.is_floating_point() and not x.is_complex()
x.device.type + str(x.is_cuda)
x.to(torch.float64)
x.to(x.device, torch.int32)
x.long().to(x)
x.double().type_as(x) + x.new_zeros([1])
torch.tensor([[n, 2], [3, 4]])
torch.tensor(f) + torch.tensor(n) + torch.tensor(True)
torch.as_tensor([f, 1.0]) + torch.as_tensor(n)
torch.tensor([1, n], dtype=torch.float64)
x.T @ x + x.mT.sum() + x.mH.sum()
x[1:, :2].split([1, 1], 1)
x.split(2, 1)
x.chunk(2)[0] + x.unbind(0)[0]
x[torch.tensor([1, 0]), 1]
torch.broadcast_shapes([3, 1], [1, 4])
int(x[0, 0] > 2) + int(x.sum().item() > 1e9)
torch.zeros([2, n], dtype=torch.int64)
torch.empty_like(x, memory_format=torch.contiguous_format).fill_(1)
x.max(), x.argmax(1), torch.sort(x, descending=True)
torch.nn.functional.interpolate(x[None, None], scale_factor=[2.0, 2.0], mode='bilinear')
""".strip().splitlines()


#: Primitives that TorchScript lacks in PyTorch 2.11.
_NEW = {"aten::broadcast_shapes"}
_KNOWN = {schema.name for schema in torch._C._jit_get_all_schemas()}
if not _KNOWN >= _NEW:
    EXPRESSIONS = [text for text in EXPRESSIONS if "broadcast_shapes" not in text]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_match_torchscript(expression: str) -> None:
    unit = torch.jit.CompilationUnit(f"def f(x, n: int, f: float):\n    return ({expression})\n")
    function: Any = unit.f
    arguments = (torch.arange(12.0).view(3, 4), 7, 1.25)
    expected = function(*arguments)
    _assert_equal(Interpreter(function.inlined_graph, _unread).run(arguments), expected)


STATEMENTS = {
    "a list that is changed": """
        items = [1, 2]
        items.append(3)
        items.extend([4, 5])
        items.insert(0, 9)
        items.reverse()
        items += [6]
        last = items.pop()
        first = items.pop(0)
        items[1] = 7
        del items[0]
        items.remove(7)
        items.sort(reverse=True)
        alias = items
        alias.append(8)
        return items, first, last, items.copy()
    """,
    "a dictionary that is changed": """
        items = {'b': 1, 'a': 2}
        items['c'] = 3
        items.update({'a': 5})
        popped = items.pop('b')
        items.setdefault('d', 4)
        del items['c']
        return items, popped, items.copy()
    """,
    "a loop that ends early": """
        total = 0
        for i in range(n):
            if i == 1:
                continue
            if i > 4:
                break
            total += i
        while total < 100:
            total *= 2
        return total
    """,
    "a function that returns in a branch": """
        if n > 100:
            return x * 2
        for i in range(n):
            if i == 3:
                return x * i
        return x
    """,
    "a variable that one branch leaves undefined": """
        if n > 3:
            y = x + 1
        else:
            raise ValueError('no')
        return y
    """,
    "an optional that is refined": """
        y: Optional[Tensor] = None
        if n > 3:
            y = x
        if y is not None:
            return y + 1
        return x
    """,
    "tuples": """
        pair = (x, (n, f))
        a, (b, c) = pair
        return pair[1][0] + b, pair[0:1], c
    """,
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_statements_match_torchscript(name: str) -> None:
    source = "def f(x, n: int, f: float):\n" + STATEMENTS[name].strip("\n").rstrip() + "\n"
    function: Any = torch.jit.CompilationUnit(source).f
    arguments = (torch.arange(12.0).view(3, 4), 7, 1.25)
    expected = function(*arguments)
    _assert_equal(Interpreter(function.inlined_graph, _unread).run(arguments), expected)


def _unread(name: str) -> Any:
    raise AssertionError(f"a function has no attribute {name}")


def _assert_equal(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected, strict=True):
            _assert_equal(ours, theirs)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        _assert_equal(list(actual.values()), list(expected.values()))
    else:
        assert actual == expected


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not None and d.itemsize])
def test_dtypes_have_torchscripts_numbers(dtype: torch.dtype) -> None:
    unit = torch.jit.CompilationUnit("def f(x):\n    return x.dtype\n")
    if not str(dtype).startswith("torch.q") and dtype is not torch.complex32:
        assert DTYPES[unit.f(torch.empty(0, dtype=dtype))] is dtype


def test_primitives_are_operators_of_torchscript() -> None:
    assert set(PRIMITIVES) - _KNOWN <= _NEW
    assert _KNOWN >= PREFERRED


def test_an_unknown_operator_is_not_found() -> None:
    assert find_operator("aten::no_such_operator") is None
    assert find_operator("prim::PythonOp") is None


def test_a_place_is_one_line() -> None:
    text = (
        'File "a.py", line 3\n    def f(x):\n        return x[0]\n               ~~~~ <--- HERE\n'
    )
    assert source_line(text) == "a.py:3: return x[0]"
    assert source_line("") == ""
