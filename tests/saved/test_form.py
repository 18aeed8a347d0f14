"""Saved modules with programs for many shapes: which program serves a call."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from tvm.relax import op as R

import tvmify
from tests.runtime import programs
from tvmify.artifact import Artifact
from tvmify.artifact.expressions import Condition, Term
from tvmify.artifact.geometry import Geometry
from tvmify.artifact.results import Argument, Computed, View
from tvmify.artifact.shapes import Shapes, Symbol
from tvmify.runtime import archive
from tvmify.saved.form import CompiledCall, saved_form

EVEN = Condition("==", (Term("%", ("s0", 2)), 0))


class Negated(nn.Module):
    """Computes something else than all programs here, so that results show which one ran."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


def rows(lower: int, upper: int, hint: int, *guards: Condition) -> Shapes:
    return Shapes((Symbol("s0", lower, upper),), {0: ("s0", 16)}, guards, (hint,))


def doubled(shapes: Shapes) -> Artifact:
    return programs.of_rows(lambda x: R.add(x, x), shapes)


def squared(shapes: Shapes) -> Artifact:
    return programs.of_rows(lambda x: R.multiply(x, x), shapes)


def call(count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.rand(count, 16) + 3,), {}


def module_of(*artifacts: tuple[int, Artifact], strict: bool = True) -> Any:
    compiled = [CompiledCall(call(count), artifact) for count, artifact in artifacts]
    module, description = saved_form(Negated(), "Negated", compiled, strict)
    module.description = description
    return module


def check(module: Any, count: int, expected: Any) -> None:
    (x,), _ = call(count)
    torch.testing.assert_close(module(x), expected(x))


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def test_program_serves_unseen_shapes(tmp_path: Path) -> None:
    module = module_of((4, doubled(rows(2, 512, 48, EVEN))))
    archive.write(module, tmp_path / "model.pt", module.description)
    for served in (module, tvmify.load(tmp_path / "model.pt", strict=True)):
        for count in (2, 4, 6, 48, 512):
            check(served, count, double)
        for count in (0, 1, 3, 514):
            with pytest.raises(RuntimeError, match="holds no code"):
                served(call(count)[0][0])
        with pytest.raises(RuntimeError, match="holds no code"):
            served(torch.rand(4, 15))
        with pytest.raises(RuntimeError, match="holds no code"):
            served(torch.rand(4, 16, dtype=torch.float64))


def test_unserved_call_runs_uncompiled() -> None:
    module = module_of((4, doubled(rows(2, 512, 48, EVEN))), strict=False)
    with pytest.warns(UserWarning, match="holds no code"):
        check(module, 3, torch.neg)
    check(module, 6, double)


def test_exact_signature_precedes_the_nearest_size() -> None:
    small, large = rows(2, 512, 8), rows(2, 512, 256)
    module = module_of(
        (8, doubled(large)), (8, squared(small)), (7, programs.transposed((7, 16), "float32"))
    )
    check(module, 7, lambda x: x.t())
    for count in (2, 8, 20):
        check(module, count, torch.square)
    for count in (100, 512):
        check(module, count, double)


def test_a_program_is_saved_once_for_all_its_calls() -> None:
    artifact = doubled(rows(2, 512, 48))
    module = module_of((4, artifact), (9, artifact))
    assert len(module._tvmify.explain()) == 1
    (signature,) = module.description["signatures"]
    assert signature["arguments"] == "(float32[_, _])"
    assert Shapes.from_json(signature["shapes"]) == artifact.shapes
    check(module, 100, double)


def test_a_saved_module_can_be_saved_again(tmp_path: Path) -> None:
    module = module_of((4, doubled(rows(2, 512, 48))))
    description = module.description
    for _ in range(2):
        archive.write(module, tmp_path / "model.pt", description)
        module = tvmify.load(tmp_path / "model.pt", strict=True)
    check(module, 13, double)


def test_the_place_of_a_tensor_among_all_arguments_is_found() -> None:
    class Named(nn.Module):
        def forward(self, flag: bool, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
            return -a

    # By name, arguments are flattened in another order than forward declares them.
    kwargs = {"a": torch.rand(3), "flag": True, "b": torch.rand(4, 16)}
    symbols = Symbol("s0", 2), Symbol("s1", 2)
    shapes = Shapes(symbols, {0: ("s0",), 2: ("s1", 16)}, (), (3, 4))
    artifact = dataclasses.replace(doubled(shapes), inputs=(2,))
    module = saved_form(Named(), "Named", [CompiledCall(((), kwargs), artifact)], True).module
    x = torch.rand(9, 16)
    torch.testing.assert_close(module(True, x, torch.rand(5)), x + x)


@pytest.mark.parametrize("text", ["[", "{}", '{"symbols": []}'])
def test_forged_shapes_are_refused(text: str) -> None:
    module = module_of((4, doubled(rows(2, 512, 48))))
    code = torch.classes.tvmify.CompiledModule("", torch.zeros(1, dtype=torch.uint8), [], [])
    with pytest.raises(ValueError):
        module._tvmify.add("(float32[_, _])", [0], [], [], [0], 0, code, text, False)


def test_views_have_the_sizes_of_the_call() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    half = Term("max", (Term("//", ("s0", 2)), 1, Term("-", ("s0", 100))))
    views = (
        View(Computed(0), Geometry((half, 16), (32, 1), 16)),
        View(Argument(0), Geometry((Term("*", ("s0", 4)), 4), (4, 1), 0)),
    )
    artifact = dataclasses.replace(
        doubled(rows(2, 512, 48)),
        outputs=views,
        output_structure=pytree.treespec_dumps(pytree.tree_structure((0, 0))),
    )
    module = saved_form(Both(), "Both", [CompiledCall(call(4), artifact)], True).module
    for count in (2, 4, 10):
        (x,), _ = call(count)
        odd, whole = module(x)
        torch.testing.assert_close(odd, (x + x)[1::2])
        torch.testing.assert_close(whole, x.view(-1, 4))
