"""A kept error does not keep the objects of its call alive."""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tvmify import tvmify
from tvmify.dispatch.reasons import again, without_frames
from tvmify.errors import NotCompiled, TvmifyWarning, UnsupportedOperator


def _depends_on_values(x: Tensor) -> Tensor:
    return x.unique()


def _length(error: BaseException) -> int:
    return len(traceback.extract_tb(error.__traceback__))


def test_a_reason_keeps_no_arguments(inference: None) -> None:
    fast: Any = tvmify(_depends_on_values)
    x = torch.ones(3)
    with pytest.warns(TvmifyWarning, match="depends on the values"):
        fast(x)
    argument = weakref.ref(x)
    del x
    gc.collect()
    assert argument() is None
    assert "depends on the values" in str(fast.explain())


def test_a_strict_call_says_each_time_where_it_failed_first(inference: None) -> None:
    fast: Any = tvmify(_depends_on_values, strict=True)
    raised = []
    for _ in range(3):
        with pytest.raises(NotCompiled) as caught:
            fast(torch.ones(3))
        raised.append(caught.value)
    assert "in _refuse_unknown_shapes" in str(raised[-1].__cause__)
    assert len({_length(error) for error in raised}) == 1
    assert len(set(map(id, raised))) == 3


def test_copied_error_keeps_attributes_and_cause() -> None:
    error = without_frames(_caught())
    first = error.__cause__
    assert without_frames(error).__cause__ is first
    copy = again(error)
    assert (type(copy), str(copy), copy.operators) == (type(error), str(error), ("aten::mul",))
    assert "ZeroDivisionError" in str(copy.__cause__)


def _caught() -> UnsupportedOperator:
    with pytest.raises(UnsupportedOperator) as caught:
        _raise_two()
    return caught.value


def _raise_two() -> None:
    try:
        _ = 1 / 0
    except ZeroDivisionError as inner:
        raise UnsupportedOperator(["aten::mul"], "for a test") from inner
