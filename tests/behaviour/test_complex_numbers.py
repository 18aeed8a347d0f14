"""Complex arguments, weights and results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tests.tolerances import assert_close_to_reference

pytestmark = pytest.mark.usefixtures("inference")


def _random(*shape: int, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


class Spectral(nn.Module):
    """A layer of a Fourier neural operator (Li et al., 2021): it weights the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(_random(3, 4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x)
        mixed = spectrum.new_zeros(len(x), 4, spectrum.shape[-1])
        mixed[..., :5] = torch.einsum("bik,iok->bok", spectrum[..., :5], self.weight)
        return torch.fft.irfft(mixed, n=x.shape[-1])


class Rotating(nn.Module):
    """Rotary positions in a buffer, as in the first version of Llama."""

    rotation: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rotation", torch.polar(torch.ones(9, 4), torch.randn(9, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x.unflatten(-1, (4, 2)))
        return torch.view_as_real(z * self.rotation[: x.shape[1]]).flatten(-2)


class Averaging(nn.Module):
    """Keeps its result in a buffer, and returns it."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", _random(3))

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.mean.mul_(0.5).add_(z)
        return self.mean, self.mean * z.conj()


class Mixed(nn.Module):
    """Operators that compute with complex numbers, that move them, and that are bridged."""

    def forward(self, z: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        moved = torch.cat([z.mT, other.mT], 1).unflatten(1, (2, -1)).movedim(0, 2)
        low, high = (-z).split([1, z.shape[0] - 1])
        return moved * 2 - 1j, torch.stack([z, other]), low - high, z.exp().abs(), z @ other.mT


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_arguments_and_results_of_any_size(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fast = tvmify.tvmify(Mixed().eval(), cache=False, strict=True)
    for rows in (3, 5, 6):
        args = _random(rows, 4, dtype=dtype), _random(rows, 4, dtype=dtype)
        assert_close_to_reference(fast(*args), Mixed(), args, {})
    assert fast.cache_info().builds == 2


@pytest.mark.parametrize("shape", [(), (0, 3), (3,)], ids=str)
def test_results_have_memory_of_their_own(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    fast: Any = tvmify.tvmify(lambda z: z * z, cache=False, strict=True)
    z = _random(*shape)
    result = fast(z)
    torch.testing.assert_close(result, z * z)
    assert result._base is None and result.untyped_storage().nbytes() == z.nbytes


def test_arguments_are_written_to_and_viewed() -> None:
    torch.manual_seed(0)

    def forward(z: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z.mul_(2j)
        return z, z[1:].mT, other.unsqueeze(0), z + other

    fast: Any = tvmify.tvmify(forward, cache=False, strict=True)
    z, other = _random(4, 3), _random(4, 3)
    want = forward(expected := z.clone(), other)
    got = fast(z, other)
    assert got[0] is z
    for result, argument in ((got[1], z[1:].mT), (got[2], other.unsqueeze(0))):
        assert result.data_ptr() == argument.data_ptr() and result.stride() == argument.stride()
    torch.testing.assert_close((got, z), (want, expected))


def test_weights_and_buffers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for module, x in ((Spectral(), torch.randn(2, 3, 16)), (Rotating(), torch.randn(2, 7, 8))):
        fast = tvmify.tvmify(module.eval(), cache=False, strict=True)
        assert_close_to_reference(fast(x), module, (x,), {})
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.mul_(1j)
        assert_close_to_reference(fast(x), module, (x,), {})
        assert fast.cache_info().builds == 1
        tvmify.save(fast, tmp_path / "model.pt")
        assert_close_to_reference(torch.jit.load(tmp_path / "model.pt")(x), module, (x,), {})


def test_a_buffer_that_forward_writes_to() -> None:
    torch.manual_seed(0)
    module = Averaging().eval()
    fast = tvmify.tvmify(copy.deepcopy(module), cache=False, strict=True)
    for _ in range(2):
        z = _random(3)
        got, want = fast(z), module(z)
        assert got[0] is fast.mean
        torch.testing.assert_close(got, want)


def test_saved_programs_accept_and_return_complex_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    fast = tvmify.tvmify(Mixed().eval(), cache=False)
    args = _random(3, 4), _random(3, 4)
    fast(*args)
    tvmify.save(fast, tmp_path / "model.pt")
    loaded = tvmify.load(tmp_path / "model.pt", strict=True)
    for z in (args[0], *lazy(args[0])):
        assert_close_to_reference(loaded(z, args[1]), Mixed(), (z, args[1]), {})


def test_arguments_of_any_strides() -> None:
    torch.manual_seed(0)
    fast: Any = tvmify.tvmify(lambda z, other: z * other, cache=False, strict=True)
    z, other = _random(8, 3)[::2], _random(3, 4).mT
    torch.testing.assert_close(fast(z, other), z * other)


def lazy(z: torch.Tensor) -> list[torch.Tensor]:
    """Lazy conjugates and negatives of complex numbers."""
    return [z.conj(), z.mT.contiguous().mT.conj(), torch._neg_view(z), torch._neg_view(z.conj())]


def test_arguments_that_are_conjugated_without_a_copy() -> None:
    torch.manual_seed(0)

    def forward(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return z * 2j, z.imag + 1, z, z[1:], z.abs()

    fast: Any = tvmify.tvmify(forward, cache=False, strict=True)
    for z in (_random(4, 3), *lazy(_random(4, 3))):
        got, want = fast(z), forward(z)
        torch.testing.assert_close(got, want)
        assert got[2] is z and got[3].data_ptr() == z[1:].data_ptr()
    parts: Any = tvmify.tvmify(lambda x: x.exp() + x, cache=False, strict=True)
    x = _random(4, 3).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(parts(x), x.exp() + x)
    assert fast.cache_info().builds == parts.cache_info().builds == 1


def test_writes_to_lazy_conjugates() -> None:
    torch.manual_seed(0)

    def forward(z: torch.Tensor) -> torch.Tensor:
        z.mul_(2j)
        z.imag.add_(1)
        return z.sum()

    fast: Any = tvmify.tvmify(forward, cache=False, strict=True)
    for z in (_random(4, 3), *lazy(_random(4, 3))):
        other = torch.empty_like(z).copy_(z)
        torch.testing.assert_close(fast(z), forward(other))
        torch.testing.assert_close(z, other)


@pytest.mark.filterwarnings("ignore:.*runs in eager")
@pytest.mark.parametrize(
    "function",
    [lambda z: (z.resolve_conj(), z * 2), lambda z: z * 2 if z.is_conj() else z * 3],
    ids=["resolved", "asked"],
)
def test_eager_runs_if_a_missing_copy_matters(function: Callable[..., Any]) -> None:
    fast: Any = tvmify.tvmify(function, cache=False)
    z = _random(3)
    torch.testing.assert_close(fast(z), function(z))
    assert fast.cache_info().eager == 0
    got, want = fast(z.conj()), function(z.conj())
    torch.testing.assert_close(got, want)
    assert fast.cache_info().eager == 1
