"""What a call is, by the schema of its operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tests.compiler.programs import check_values, compiled
from tvmify.compiler.aten import operators

aten = torch.ops.aten


own = torch.ops.tvmify_tests


@torch.library.custom_op("tvmify_tests::silu", mutates_args=())
def silu(x: torch.Tensor) -> torch.Tensor:
    return x + 100


@torch.library.custom_op("tvmify_tests::dropout", mutates_args=())
def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return x * 2


@silu.register_fake
@dropout.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x)


def test_custom_operators_named_as_those_of_pytorch_are_not_taken_for_them() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return own.silu(x.exp()), own.dropout(x, 0.5, False)

    x = torch.randn(7)
    artifact = compiled(program, x)
    assert len(artifact.report["bridged"]) == 2
    check_values(artifact, program, x)


def called(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    return fx.Graph().call_function(operator, args, kwargs)


def test_names_of_operators_that_are_not_of_pytorch_have_a_namespace() -> None:
    theirs, other = called(aten.silu.default), called(own.silu.default)
    assert operators.short_name(theirs) == "silu.default"
    assert operators.short_name(other) == "tvmify_tests.silu.default"
    assert operators.base_name(theirs) == "silu"
    assert operators.base_name(other) == "tvmify_tests.silu"


def test_arguments_by_position_by_name_and_by_default() -> None:
    node = called(aten.slice.Tensor, "x", 1, end=3)
    expected = {"self": "x", "dim": 1, "start": None, "end": 3, "step": 1}
    assert operators.arguments(node) == expected
