from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.compiler.programs import compiled, executed


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
