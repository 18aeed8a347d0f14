"""Loaded models as parts of other modules, which are saved again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tests.saved.nets import Unscriptable, close, image, saved
from tvmify import SaveError


class Pipeline(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = nn.functional.interpolate(pixels.float() / 255, [9, 9], mode="bilinear")
        return self.net(x - self.mean).argmax(1)


@pytest.mark.parametrize("way", ["scripted", "traced"])
def test_inside_of_a_pipeline(tmp_path: Path, small: nn.Module, way: str) -> None:
    loaded = saved(small, tmp_path, [image()])
    pixels = torch.randint(0, 256, (1, 3, 20, 16), dtype=torch.uint8)
    pipeline = Pipeline(loaded).eval()
    script: Any = (
        torch.jit.script(pipeline) if way == "scripted" else torch.jit.trace(pipeline, (pixels,))
    )
    expected = Pipeline(small)(pixels)
    assert torch.equal(script(pixels), expected)
    torch.jit.save(script, tmp_path / "pipeline.pt")
    again = torch.jit.load(tmp_path / "pipeline.pt")
    assert torch.equal(again(pixels), expected)
    again.net._tvmify.set_strict(True)
    assert torch.equal(again(pixels), expected)


def test_repeated_save_and_load(tmp_path: Path, small: nn.Module) -> None:
    loaded = saved(small, tmp_path, [image()])
    torch.jit.save(loaded, tmp_path / "again.pt")
    again = torch.jit.load(tmp_path / "again.pt")
    again._tvmify.set_strict(True)
    x = image()
    close(again(x), small(x))


def test_a_loaded_model_is_compiled_for_more_shapes(tmp_path: Path, small: nn.Module) -> None:
    loaded = saved(small, tmp_path, [image()])
    model = tvmify.tvmify(loaded, strict=True)
    for batch in (1, 3):
        close(model(x := image(batch)), small(x))
    again = saved(model, tmp_path)
    for batch in (1, 3):
        close(again(x := image(batch)), small(x))
    with pytest.raises(SaveError, match="without being scripted"):
        tvmify.tvmify(saved(Unscriptable().eval(), tmp_path, [(1, 4)]))
