from __future__ import annotations

import torch

from tvmify.dispatch.request import Request
from tvmify.options import CompileOptions
from tvmify.signature import TensorSpec

OPTIONS = CompileOptions.of({"target": "llvm"})


def test_a_request_without_tensors_asks_for_the_same() -> None:
    x, y = torch.ones(2, 3), torch.ones(4, dtype=torch.int64)
    request = Request.of((x, [y, 2]), {"same": x}, OPTIONS)
    later = request.without_tensors()
    first, (second, number) = later.args
    assert (later.signature, later.title(), number) == (request.signature, request.title(), 2)
    assert first is not x
    assert first is later.kwargs["same"]
    assert (first.tolist(), second.dtype) == ([[0, 0, 0]] * 2, torch.int64)
    assert all(leaf is not x and leaf is not y for leaf in later.leaves)


def test_named_target_overrides_the_option() -> None:
    assert Request.of((), {}, OPTIONS).target == "llvm"
    assert Request.of((), {}, OPTIONS, {"kind": "cuda"}).target == {"kind": "cuda"}


def test_specs_hold_no_tensors() -> None:
    request = Request.of((torch.ones(2, 3),), {"scale": 2.0}, OPTIONS)
    assert request.specs() == ((TensorSpec((2, 3)),), {"scale": 2.0})


def test_autocast_is_part_of_the_title() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert Request.of((torch.ones(2),), {}, OPTIONS).title().endswith("autocast cpu bfloat16")
    assert Request.of((torch.ones(2),), {}, OPTIONS).title() == "(float32[2] cpu)"
