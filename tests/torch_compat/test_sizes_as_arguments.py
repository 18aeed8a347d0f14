"""Programs for any size, with functions that take sizes as plain integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim, export
from torch.nn import functional as F

from tests.compiler.programs import Program
from tests.pytorch import IS_2_11
from tvmify.torch_compat.sizes_as_arguments import KeepingSizes

CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "linspace": lambda x: x + torch.linspace(-1, 2, x.size(0))[:, None, None],
    "centres": lambda x: torch.linspace(0.5, x.size(2) - 0.5, x.size(2), dtype=torch.float64),
    "pixels": lambda x: torch.arange(-1.5, x.size(2)) / x.size(2),
    "operator": lambda x: torch.ops.aten.linspace(0, 1, x.size(1)) + x.sum(),
    "hann": lambda x: x * torch.hann_window(x.size(2)),
    "hamming": lambda x: x * torch.hamming_window(x.size(2), periodic=False),
    "largest": lambda x: F.max_pool1d(x, x.size(2)),
    "largest of images": lambda x: F.max_pool2d(x, (x.size(1), x.size(2)), stride=1),
    "windows": lambda x: F.max_pool1d(x, 3, 2, padding=1),
    "windows of two axes": lambda x: F.max_pool1d(x[0], 2, dilation=2),
    "half windows": lambda x: F.max_pool1d(F.pad(x, (1, x.size(2))), 2, ceil_mode=True),
    "mean": lambda x: F.avg_pool1d(x, x.size(2)),
    "mean of images": lambda x: F.avg_pool2d(x, x.shape[1:]),
    "sorted": lambda x: x.take_along_dim(x.argsort(1), 1),
    "flat": lambda x: torch.take_along_dim(x, x.flatten().argsort()),
    "broadcast": lambda x: torch.take_along_dim(x, x[:1].argsort(1), dim=-2),
    "kron": lambda x: torch.kron(x, x[0, :2, :3]),
    "one hot": lambda x: F.one_hot(x.argmax(1), x.size(1)),
    "a waveform": lambda x: torch.istft(
        torch.complex(x, -x)[:, :1].expand(-1, 3, -1),
        n_fft=4,
        hop_length=2,
        window=torch.ones(4),
        length=2 * x.size(2) - 3,
    ),
    "frequencies": lambda x: torch.fft.fftfreq(x.size(2), 0.1, dtype=torch.float64),
    "half of the frequencies": lambda x: torch.fft.rfftfreq(x.size(2)),
    "a diagonal": lambda x: x[0].clone().fill_diagonal_(0.5) + x[1].clone().fill_diagonal_(-1),
    "a lower triangle": lambda x: torch.tril_indices(x.size(2), x.size(2), offset=-1),
    "a lower triangle with its diagonal": lambda x: torch.tril_indices(x.size(1), x.size(1)),
    "an upper triangle": lambda x: torch.triu_indices(x.size(2), x.size(2), 1, dtype=torch.int32),
    "an upper triangle with its diagonal": lambda x: torch.triu_indices(x.size(0), x.size(0)),
    "affine": lambda x: F.affine_grid(
        x[:, :2, :3] * 1, [x.size(0), 3, x.size(1), x.size(2)], align_corners=False
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_stay_symbols(name: str) -> None:
    function = CASES[name]
    sizes = (dict.fromkeys(range(3), Dim.DYNAMIC),)
    with KeepingSizes():
        program = export(
            Program(function), (torch.zeros(5, 6, 7),), dynamic_shapes=(sizes,), strict=False
        )
    for seed, shape in enumerate([(5, 6, 7), (2, 3, 8), (9, 17, 16)]):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        # with windows at every second place, PyTorch 2.11 demands that an odd length stays odd
        if name.startswith("windows") and IS_2_11:
            x = x[..., shape[2] % 2 == 0 :]
        torch.testing.assert_close(program.module()(x), function(x), rtol=1e-6, atol=1e-6)


def test_ends_are_exact() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.linspace(-0.1, 0.3, x.size(0))

    with KeepingSizes():
        sizes = ({0: Dim.DYNAMIC},)
        program = export(
            Program(function), (torch.zeros(4),), dynamic_shapes=(sizes,), strict=False
        )
    for count in (2, 3, 10, 97):
        found, wanted = program.module()(torch.zeros(count)), function(torch.zeros(count))
        assert torch.equal(found[[0, -1]], wanted[[0, -1]])


def test_numbers_are_left_to_torch() -> None:
    with KeepingSizes():
        assert torch.equal(torch.linspace(0, 1, 1), torch.zeros(1))
        assert torch.linspace(0, 10, 5, dtype=torch.int64).tolist() == [0, 2, 5, 7, 10]
