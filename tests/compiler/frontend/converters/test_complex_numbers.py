"""Complex numbers inside programs with float arguments and results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.compiler.programs import check, check_each
from tests.tolerances import assert_close_to_reference
from tvmify import tvmify


def _complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def _real(z: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(z.resolve_conj())


class Rotary(nn.Module):
    """Rotary positions, as in the first version of Llama."""

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        rotation = torch.complex(angles.cos(), angles.sin())
        return torch.view_as_real(_complex(x.float()) * rotation).flatten(-2).type_as(x)


def test_arithmetic():
    other = torch.randn(6, 4)

    def of(function: Any) -> Any:
        return lambda x: _real(function(_complex(x)))

    check_each(
        {
            "product": of(lambda z: z * (z + 1)),
            "real operand": of(lambda z: (z - other) * other + z),
            "real and complex": of(lambda z: torch.complex(other, other) * z),
            "numbers": of(lambda z: z * (1 - 2j) + 3 - 2 * z),
            "conjugate": of(lambda z: z.conj() * z),
            "broadcast": of(lambda z: z[:, :1] * z[..., :1] - z),
            "without axes": of(lambda z: z[0, 0, 0] * 2j),
            "parts": lambda x: (_complex(x).real + 1, _complex(x * 2).imag),
        },
        torch.randn(2, 6, 8),
    )


def test_views():
    def views(x: torch.Tensor) -> torch.Tensor:
        z = (_complex(x) * 2).permute(1, 0, 2).unsqueeze(1).expand(-1, 3, -1, -1)
        return _real(z.reshape(-1, 4) * 1j)

    check(views, torch.randn(2, 6, 8))


def test_constants():
    table = torch.randn(6, 4, dtype=torch.complex64)
    conjugate = table.conj()
    check_each(
        {
            "parts of a conjugate": lambda x: x * table.conj().imag - table.conj().real,
            "resolved": lambda x: x[..., None] + _real(table.conj()),
            "a conjugate": lambda x: _real(conjugate) * x[..., None],
        },
        torch.randn(6, 4),
    )


def test_constants_without_elements():
    table = torch.zeros(0, 4, dtype=torch.complex64)
    check(lambda x: (x + 1, _real(x[:0] * table)), torch.randn(6, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary_positions_of_any_length(dtype: torch.dtype):
    torch.manual_seed(0)
    module = Rotary().eval()
    sizes = ({0: Dim.AUTO, 2: Dim.AUTO}, {0: Dim.AUTO})
    fast = tvmify(module, dynamic_shapes=sizes, cache=False, strict=True)
    for batch, length in ((2, 24), (2, 30)):
        args = torch.randn(batch, 4, length, 16, dtype=dtype), torch.randn(length, 8)
        assert_close_to_reference(fast(*args), module, args, {})
    assert fast.cache_info().builds == 1
