from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.programs import check_each, compiled, executed, with_specials
from tvmify import tvmify


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ceil_mode": True},
        {"padding": 1, "count_include_pad": False},
        {"divisor_override": 3},
    ],
    ids=str,
)
def test_averages_of_integers_are_truncated(rank: int, options: dict[str, Any]) -> None:
    def pooled(x: torch.Tensor) -> torch.Tensor:
        pool = F.avg_pool2d if rank == 2 else F.avg_pool3d
        return pool(x, 2, **options)

    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-50, 50, (2, 3, *[5] * rank), generator=generator)
    artifact = compiled(pooled, x)
    assert not artifact.report["bridged"]
    assert torch.equal(executed(artifact, pooled, x), pooled(x))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("aligned", [False, True])
def test_images_of_bytes_are_resized_as_in_eager(mode: str, aligned: bool) -> None:
    def resized(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=(7, 9), mode=mode, align_corners=aligned)

    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (1, 3, 5, 6), generator=generator, dtype=torch.uint8)
    assert torch.equal(executed(compiled(resized, x), resized, x), resized(x))


def test_adaptive_maxima_keep_specials():
    sizes = (1, 2, (3, 2), (None, 5), (11, 1), (0, 2))
    images = {f"images {size}": nn.AdaptiveMaxPool2d(size) for size in sizes}
    x = with_specials(2, 3, 8, 7)
    x[0, 1] = float("-inf")
    check_each(images | {"image": lambda x: F.adaptive_max_pool2d(x[0], (3, 2))}, x)
    check_each({f"lines {n}": nn.AdaptiveMaxPool1d(n) for n in (1, 4, 9)}, x[0])
    check_each({f"volumes {n}": nn.AdaptiveMaxPool3d(n) for n in (1, 2, 3)}, x[None])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_adaptive_maxima_of_other_dtypes_and_layouts(dtype: torch.dtype):
    images = {str(size): nn.AdaptiveMaxPool2d(size) for size in (1, (3, 2))}
    x = with_specials(2, 3, 8, 7).to(dtype)
    check_each(images, x)
    check_each(images, x.contiguous(memory_format=torch.channels_last))
    check_each(images, x[:0])


def test_positions_of_adaptive_maxima_and_those_of_integers_are_left_to_pytorch():
    def program(x: torch.Tensor, whole: torch.Tensor) -> Any:
        return F.adaptive_max_pool2d(x, 2, True)[1] + 1, F.adaptive_max_pool2d(whole, 1)

    x = torch.randn(1, 3, 8, 8)
    artifact = compiled(program, x, x.int())
    assert artifact.report["bridged"] == {"aten.adaptive_max_pool2d.default": 2}
    with pytest.raises(RuntimeError, match="not implemented"):
        executed(artifact, program, x, x.int())


def test_one_program_computes_the_largest_of_images_of_any_size():
    module = nn.AdaptiveMaxPool2d(1).eval()
    fast = tvmify(module, dynamic=True, cache=False, strict=True)
    for shape in ((2, 3, 9, 8), (2, 3, 8, 10)):
        x = with_specials(*shape)
        torch.testing.assert_close(fast(x), module(x), rtol=0, atol=0, equal_nan=True)
    assert fast.cache_info().builds == 1
