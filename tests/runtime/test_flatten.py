"""The leaves of a call, and the key that distinguishes calls."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import sys
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tvmify.runtime import flatten


class Point(NamedTuple):
    x: object
    y: object


class Subclass(torch.Tensor):
    pass


X = torch.zeros(2, 3)


def key(*args: Any, **kwargs: Any) -> bytes | None:
    return flatten(args, kwargs)[1]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((X,), {}),
        ((1, 2.0, None, "s", True, 3j, 2**80), {}),
        (([X, (X, [])], {"b": X, "a": {}}), {"z": X, "c": [1, None]}),
        ((torch.float32, torch.device("cpu")), {"k": ((), ((),))}),
        (({1: X, None: X, 2.5: X},), {}),
    ],
)
def test_leaves_are_in_the_order_of_pytree(args, kwargs):
    leaves, known = flatten(args, kwargs)
    expected = pytree.tree_leaves((args, kwargs))
    assert len(leaves) == len(expected) and known is not None
    assert all(leaf is other for leaf, other in zip(leaves, expected, strict=True))


def test_equal_calls_have_equal_keys():
    call = ([X, 1.5, "text"], {"a": (X, None)})
    assert key(*call, k=2**100) == key(*copy.deepcopy(call), k=2**100)
    assert key(torch.ones(2, 3)) == key(X)
    assert key(float("nan")) == key(float("nan"))


DIFFERENT: list[Any] = [
    (),
    (X,),
    (X, X),
    ([X],),
    ((X,),),
    ({"a": X},),
    ({"b": X},),
    ({1: X},),
    ({True: X},),
    ({"a": X, "b": X},),
    ({"b": X, "a": X},),
    (torch.zeros(3, 2),),
    (torch.zeros(6),),
    (torch.zeros(2, 3, 1),),
    (torch.zeros(()),),
    (torch.zeros(0),),
    (X.double(),),
    (X.int(),),
    (X.bool(),),
    (X.to("meta"),),
    (X.to(torch.complex64),),
    (X.to(torch.complex64).conj(),),
    (torch._neg_view(X),),
    (X.to_sparse(),),
    (torch.nn.Parameter(X, requires_grad=False),),
    (torch.zeros(2, 3, requires_grad=True),),
    (None,),
    (False,),
    (True,),
    (0,),
    (1,),
    (-1,),
    (2**63,),
    (2**64,),
    (0.0,),
    (-0.0,),
    (1.0,),
    (float("inf"),),
    (1j,),
    (1 + 0j,),
    ("",),
    ("1",),
    ("None",),
    ("a", "b"),
    ("ab",),
    ("a\0b",),
    ([],),
    ([[]],),
    ([], []),
    ([None],),
    ((),),
    ({},),
    (torch.float32,),
    (torch.float64,),
    (torch.device("cpu"),),
    (torch.device("cuda"),),
    (torch.device("cuda", 1),),
]


def test_different_calls_have_different_keys():
    keys = [key(*args) for args in DIFFERENT] + [key(a=X), key(b=X), key(X, b=X)]
    assert None not in keys and len(set(keys)) == len(keys)


def test_inference_tensors_have_distinct_keys():
    with torch.inference_mode():
        x = torch.zeros(2, 3)
    assert key(x) is not None and key(x) != key(X)


def test_requires_grad_counts_in_every_mode():
    y = torch.zeros(2, 3, requires_grad=True)
    assert key(y) != key(X)
    with torch.no_grad():
        assert key(y) != key(X)  # forward may ask


@contextlib.contextmanager
def _default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _matmul_precision():
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def _flush_denormal():
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


MODES = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast half": lambda: torch.autocast("cpu", dtype=torch.float16),
    "default dtype": _default_dtype,
    "deterministic": _deterministic,
    "matmul precision": _matmul_precision,
    "flush denormal": _flush_denormal,
}


def test_key_depends_on_modes():
    keys = {"none": key(X)}
    for name, mode in MODES.items():
        with mode():
            keys[name] = key(X)
        assert key(X) == keys["none"], f"{name} left something behind"
    assert None not in keys.values() and len(set(keys.values())) == len(keys)


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_Mode, _DispatchMode, lambda: torch.device("cpu")])
def test_no_key_under_a_torch_function_mode(mode):
    with mode():
        leaves, unknown = flatten((X, [X]), {})
    assert unknown is None and leaves == (X, X)
    assert key(X) is not None


def test_disabled_modes_do_not_change_the_key():
    with _Mode(), torch._C.DisableTorchFunction():
        assert key(X) == key(X) is not None


def test_no_key_under_a_transform_or_tracer():
    seen: list[bytes | None] = []

    def function(x):
        seen.append(key(x))
        seen.append(key(X))
        return x * 2

    torch.func.vmap(function)(torch.zeros(3, 2))
    torch.func.grad(lambda x: function(x).sum())(torch.zeros(3))
    torch.jit.trace(function, torch.zeros(3), check_trace=False)
    make_fx(function)(torch.zeros(3))
    assert len(seen) == 8 and set(seen) == {None}


@pytest.mark.parametrize(
    "leaf",
    [
        object(),
        b"bytes",
        {1, 2},
        range(3),
        torch.zeros(2).as_subclass(Subclass),
        collections.OrderedDict(a=X),
        collections.deque([X]),
        Point(X, X),
        torch.Size([1, 2]),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        "\ud800",
        {Point(1, 2): X},
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_other_objects_have_no_key(leaf):
    leaves, unknown = flatten((X, leaf), {})
    assert unknown is None and leaves[0] is X
    if type(leaf) is not dict:
        assert leaves[1] is leaf


def test_a_forward_mode_tangent_has_no_key():
    with forward_ad.dual_level():
        assert key(forward_ad.make_dual(torch.zeros(3), torch.ones(3))) is None


def test_a_structure_without_end_is_a_recursion_error():
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        flatten((endless,), {})
    endless.clear()
    assert key(X) is not None


@pytest.mark.parametrize("arguments", [(), ((),), ((), (), ()), ([], {}), ((), [])])
def test_wrong_arguments_are_a_type_error(arguments):
    with pytest.raises(TypeError):
        flatten(*arguments)


def test_flatten_does_not_leak():
    text, x = "a string" * 10, torch.zeros(5)
    alive = weakref.ref(x)
    arguments = ((x, [text, object()], {"k": x}), {"z": 2**70})
    gc.collect()  # objects of earlier tests hold thousands of references to None, too
    before = sys.getrefcount(text), sys.getrefcount(x), sys.getrefcount(None)
    blocks = sys.getallocatedblocks()
    for _ in range(20_000):
        flatten(*arguments)
    gc.collect()
    assert (sys.getrefcount(text), sys.getrefcount(x)) == before[:2]
    assert abs(sys.getrefcount(None) - before[2]) < 10_000
    assert sys.getallocatedblocks() - blocks < 10_000
    del x, arguments
    assert alive() is None
