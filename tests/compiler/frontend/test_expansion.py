"""Operators that are decomposed one at a time, against PyTorch's recording of the whole program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, exported_program

from tests.compiler.programs import Program
from tvmify.compiler.frontend import expansion
from tvmify.compiler.frontend.decompositions import _tables


def export(function: Callable[..., Any], *args: Any, **options: Any) -> ExportedProgram:
    return torch.export.export(Program(function), args, strict=False, **options)


def expand(program: ExportedProgram) -> ExportedProgram | None:
    return expansion.expand(program, *_tables())


def recorded(program: ExportedProgram) -> ExportedProgram:
    composite, others = _tables()
    return exported_program._decompose_exported_program(
        program,
        cia_to_decomp=dict(composite),
        python_decomp_table=dict(others),
        joint_loss_index=None,
        decompose_custom_triton_ops=False,
    )


def operators(program: ExportedProgram) -> Counter[str]:
    return Counter(str(n.target) for n in program.graph.nodes if n.op == "call_function")


def block(x: torch.Tensor) -> torch.Tensor:
    y = nn.functional.batch_norm(x, x.mean((0, 2, 3)), x.var((0, 2, 3)))
    one, two = torch.chunk(nn.functional.hardtanh(y), 2, 1)
    scale = torch.tensor([1.0, 2.0, 0.5])
    return torch.cat([one, two], 1).transpose(1, 3).contiguous().flatten(1) * scale.sum()


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # raised inside PyTorch
@pytest.mark.parametrize("shapes", [None, ({0: Dim("batch"), 2: Dim("height")},)])
def test_same_program_as_a_recording_of_the_whole(shapes: Any) -> None:
    x = torch.randn(3, 4, 5, 6)
    program = export(block, x, dynamic_shapes=(shapes,) if shapes else None)
    expanded = expand(program)
    assert expanded is not None
    torch.testing.assert_close(expanded.module()(x), block(x))
    if shapes is None:
        assert operators(expanded) == operators(recorded(program))


def test_equal_layers_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[Any] = []
    record = expansion._Expander._record

    def counted(self: Any, *args: Any) -> Any:
        counts.append(args)
        return record(self, *args)

    monkeypatch.setattr(expansion._Expander, "_record", counted)

    def layers(n: int) -> int:
        counts.clear()
        convolutions = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(n)]
        assert expand(export(nn.Sequential(*convolutions), torch.randn(1, 4, 8, 8))) is not None
        return len(counts)

    assert layers(6) == layers(1) == 1


def test_recordings_differ_by_constants_and_types() -> None:
    def constants(x: torch.Tensor) -> Any:
        numbers = 0.0, -0.0, 1, 1.0, True, torch.inf
        return [torch.full_like(x, number) for number in numbers], x.new_full((2,), -0.0)

    expected = constants(x := torch.randn(2, 3))
    expanded = expand(export(constants, x))
    assert expanded is not None
    torch.testing.assert_close(expanded.module()(x), expected, rtol=0, atol=0)
    (positive, negative, *_), other = expanded.module()(x)
    assert not positive.signbit().any() and negative.signbit().all() and other.signbit().all()


def test_a_rule_sees_which_arguments_are_one_tensor() -> None:
    """The fast path of attention returns NaN for a row without keys in self-attention only."""
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()

    def attention(x: torch.Tensor, y: torch.Tensor) -> Any:
        one = layer(x, x, x, need_weights=False)[0]
        return one, layer(x, y, y, need_weights=False)[0]

    x, y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    with torch.no_grad():
        expanded = expand(export(attention, x, y))
        assert expanded is not None
        torch.testing.assert_close(expanded.module()(x, y), attention(x, y))


def test_a_result_that_is_none() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        expanded = expand(export(lambda x: layer(x, x, x, need_weights=False), x))
        assert expanded is not None
        result, weights = expanded.module()(x)
    assert weights is None
    assert result.shape == x.shape


def writes(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[0].mul_(2)
    return y


def writes_statistics(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.batch_norm(x, x.new_zeros(3), x.new_ones(3), training=True)


def size_by_value(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero() * 2


@pytest.mark.parametrize("function", [writes, writes_statistics, size_by_value])
def test_other_programs_are_left_to_a_recording_of_the_whole(function: Any) -> None:
    assert expand(export(function, torch.randn(2, 3))) is None
