"""From the leaves of a call to its result."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from tvm import relax

from tests.runtime import programs
from tvmify.artifact import Artifact
from tvmify.artifact.expressions import Condition, Term
from tvmify.artifact.geometry import Geometry
from tvmify.artifact.results import Argument, Computed, Constant, Repeated, View
from tvmify.artifact.shapes import Shapes, Symbol
from tvmify.runtime import Call, Executor


class Described:
    """A description that claims to be a result or a write, sometimes falsely."""

    def __init__(self, json: Any) -> None:
        self.json = json

    def to_json(self) -> Any:
        return self.json


def compiled() -> Any:
    return Executor(programs.added()).compiled


def with_outputs(outputs: Any, result: Any) -> Artifact:
    added = programs.added()
    structure = pytree.treespec_dumps(pytree.tree_structure(result))
    return dataclasses.replace(
        added, inputs=(1,), outputs=tuple(outputs), output_structure=structure
    )


@pytest.mark.parametrize(
    "result",
    [0, (0,), [0], (0, 0), [0, 0, 0], {"b": 0, "a": (0, [0])}, ((0,), 0), {}, (), [], {"a": None}],
    ids=str,
)
def test_results_have_the_structure_of_the_program(result):
    count = pytree.tree_structure(result).num_leaves
    call = Executor(with_outputs([Computed(0)] * count, result)).call()
    x = torch.randn(4, 16)
    actual = call(("unused", x))
    leaves, structure = pytree.tree_flatten(actual)
    assert structure == pytree.tree_structure(result)
    assert all(torch.equal(leaf, x + x) for leaf in leaves)
    assert len({id(leaf) for leaf in leaves}) <= 1


def test_leaves_can_be_arguments_and_constants():
    outputs = [Argument(0), Computed(0), Constant(None), Constant("text")]
    call = Executor(with_outputs(outputs, (0, 0, 0, 0))).call()
    x, other = torch.randn(4, 16), object()
    first, second, third, fourth = call((other, x))
    assert first is other and torch.equal(second, x + x) and (third, fourth) == (None, "text")


def test_views_have_the_sizes_of_the_call():
    shapes = Shapes((Symbol("s0", 2, 8),), {0: ("s0", 16)}, (Condition("!=", ("s0", 5)),), (4,))
    doubled = programs.of_rows(lambda x: relax.op.add(x, x), shapes)
    half = Geometry((Term("//", ("s0", 2)), 16), (32, 1), 16)
    last = Geometry((16,), (1,), Term("*", (Term("-", ("s0", 1)), 16)))
    both = dataclasses.replace(
        doubled,
        outputs=(View(Computed(0), half), View(Argument(0), last), Computed(0)),
        output_structure=pytree.treespec_dumps(pytree.tree_structure((0, 0, 0))),
    )
    call = Executor(both).call()
    for count in (2, 3, 8):
        x = torch.randn(count, 16)
        odd, row, whole = call((x,))
        assert torch.equal(whole, x + x)
        assert torch.equal(odd, whole[1::2][: count // 2])
        assert odd.data_ptr() == whole[1].data_ptr()
        assert torch.equal(row, x[-1]) and row.data_ptr() == x[-1].data_ptr()
    for count in (1, 5, 9):
        assert call((torch.randn(count, 16),)) is NotImplemented
    # Another call's leaves hold another tensor.
    assert call((torch.randn(3, 16), torch.randn(1))) is NotImplemented


@pytest.mark.parametrize(
    "shapes", [None, '{"symbols": [], "leaves": [], "guards": [], "hints": []}']
)
def test_a_view_with_an_unknown_symbol_is_refused(shapes):
    view = Described(["view", ["argument", 0], ["s0"], [1], 0])
    with pytest.raises(ValueError, match="symbol"):
        Call(compiled(), (0,), [view], None, (), False, shapes)  # type: ignore[list-item]  # forged


@pytest.mark.parametrize("result", [(), {"a": 0}])
def test_an_error_in_rebuild_reaches_the_caller(result):
    def rebuild(leaves: list[Any]) -> Any:
        raise KeyError("on purpose")

    call = Call(compiled(), (0,), [Computed(0)], rebuild)
    with pytest.raises(KeyError, match="on purpose"):
        call((torch.randn(4, 16),))


def test_misuse_is_an_exception():
    call = Executor(programs.added()).call()
    x = torch.randn(4, 16)
    for arguments in [(), (x,), ([x],), ((x,), (x,))]:
        with pytest.raises(TypeError, match="one tuple"):
            call(*arguments)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="one tuple"):
        call((x,), more=1)  # type: ignore[call-arg]
    with pytest.raises(IndexError, match="leaf 0 of 0"):
        call(())
    with pytest.raises(TypeError, match="a tensor and is a int"):
        call((1,))
    with pytest.raises(IndexError, match="tensor 3 is wanted"):
        Call(compiled(), (0,), [Computed(3)], None)((x,))
    with pytest.raises(IndexError, match="returns leaf 2"):
        Call(compiled(), (0,), [Argument(2)], None)((x,))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((None, (0,), [Computed(0)], None), (TypeError, RuntimeError)),
        (("native", [0], [Computed(0)], None), TypeError),
        (("native", (0,), [("computed", 0)], None), AttributeError),
        (("native", (0,), Computed(0), None), TypeError),
        (("native", (0,), [Described(["computed"])], None), ValueError),
        (("native", (0,), [Described(["other", 0])], None), ValueError),
        (("native", (0,), [Described([0, 0])], None), TypeError),
        (("native", (0,), [Described("computed")], None), TypeError),
        (("native", (0,), [Described(["computed", -1])], None), OverflowError),
        (("native", (0,), [Described(["view", ["constant", 0], [], [], 0])], None), ValueError),
        (("native", (0,), [Described(["view", ["computed", 0], (), [], 0])], None), TypeError),
        (("native", (0,), [Repeated(0)], None), ValueError),
        (("native", (0,), [Computed(0)], None, [Described([["computed", 0]] * 2)]), ValueError),
        (("native", (0,), [Computed(0)], None, [Described([["argument", 0]])]), ValueError),
        (("native", (-1,), [Computed(0)], None), OverflowError),
        (("native", ("a",), [Computed(0)], None), TypeError),
        (("native", (0,), [], None), ValueError),
        (("native", (0,), [Computed(0)] * 2, None), ValueError),
    ],
)
def test_invalid_calls_are_refused(arguments, error):
    first = compiled() if arguments[0] == "native" else arguments[0]
    with pytest.raises(error):
        Call(first, *arguments[1:])


def test_calls_do_not_leak():
    call = Executor(with_outputs([Computed(0), Argument(0), Constant("c")], (0, 0, 0))).call()
    nested = Executor(with_outputs([Computed(0)], {"a": 0})).call()
    bad = torch.randn(3)
    other, x = object(), torch.randn(4, 16)

    def run() -> None:
        call((other, x))
        nested((other, x))
        assert call((other, bad)) is NotImplemented

    run()
    gc.collect()
    before = sys.getrefcount(other), sys.getrefcount(x), sys.getrefcount(bad)
    blocks = sys.getallocatedblocks()
    for _ in range(1000):
        run()
    gc.collect()
    assert (sys.getrefcount(other), sys.getrefcount(x), sys.getrefcount(bad)) == before
    assert sys.getallocatedblocks() - blocks < 500


def test_results_are_freed_when_dropped():
    call = Executor(programs.added()).call()
    y = call((torch.randn(4, 16),))
    tensor, storage = weakref.ref(y), weakref.ref(y.untyped_storage())
    del y
    assert tensor() is None and storage() is None


def test_a_call_in_a_cycle_is_collected():
    class Holder:
        def rebuild(self, leaves: list[Any]) -> Any:
            return leaves

    holder: Any = Holder()
    holder.call = Call(compiled(), (0,), [Computed(0)], holder.rebuild)
    alive = weakref.ref(holder)
    del holder
    gc.collect()
    assert alive() is None
