"""When a saved file runs compiled, and what runs otherwise."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tests.saved.nets import close, image

#: A feature that this machine never reports: a process has to request it first.
FOREIGN = {"kind": "llvm", "mattr": ["+avx2", "+fma", "+amx-tile"]}


def fallback_of(loaded: Any, *args: Any) -> tuple[Any, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = loaded(*args)
        again = loaded(*args)
    messages = [str(w.message) for w in caught if "saved module" in str(w.message)]
    assert len(messages) == 1  # once
    close(again, result)
    return result, messages[0]


def test_another_shape_runs_in_pytorch(tmp_path: Path, small: nn.Module) -> None:
    tvmify.save(small, tmp_path / "model.pt", example_inputs=image())
    loaded = tvmify.load(tmp_path / "model.pt")
    for x, reason in (
        (image(2), "no code for these arguments"),
        (image().double()[:, :, ::2], "no code"),
    ):
        model = small.to(x.dtype)
        loaded = loaded.to(x.dtype)
        result, message = fallback_of(loaded, x)
        torch.testing.assert_close(result, model(x))
        assert reason in message and str(x.shape[0]) in message


def test_a_foreign_processor_runs_in_pytorch(tmp_path: Path, small: nn.Module) -> None:
    file = tmp_path / "model.pt"
    tvmify.save(small, file, example_inputs=image(), targets=[FOREIGN])
    result, message = fallback_of(tvmify.load(file), x := image())
    close(result, small(x))
    assert "does not have amx-tile" in message
    with pytest.raises(RuntimeError, match="amx-tile"):
        tvmify.load(file, strict=True)(x)


def test_several_targets_coexist(tmp_path: Path, small: nn.Module) -> None:
    narrow = {"kind": "llvm", "mattr": ["+avx2", "+fma"]}
    file = tmp_path / "model.pt"
    tvmify.save(small, file, example_inputs=image(), targets=[FOREIGN, narrow, None])
    loaded = tvmify.load(file, strict=True)
    x = image()
    close(loaded(x), small(x))
    assert ["not used" in line for line in loaded._tvmify.explain()] == [True, False, False]
    assert len(tvmify.inspect(file)["signatures"]) == 3


def test_gradients_run_in_pytorch(tmp_path: Path, small: nn.Module) -> None:
    tvmify.save(small, tmp_path / "model.pt", example_inputs=image())
    loaded = tvmify.load(tmp_path / "model.pt")
    x = image().requires_grad_()
    result, message = fallback_of(loaded, x)
    assert "gradients" in message
    result.sum().backward()
    assert x.grad is not None
    loaded.head.weight.requires_grad_()
    loaded(image()).sum().backward()
    assert loaded.head.weight.grad is not None
    with torch.no_grad():
        assert not loaded(image()).requires_grad


def test_training_mode_and_changed_attributes_run_in_pytorch(
    tmp_path: Path, small: nn.Module
) -> None:
    tvmify.save(small, tmp_path / "model.pt", example_inputs=image())
    loaded = tvmify.load(tmp_path / "model.pt")
    loaded.train()
    _, message = fallback_of(loaded, image())
    assert "attribute" in message
    loaded.eval()
    loaded.load_state_dict(small.state_dict())
    close(loaded(x := image()), small(x))
    loaded.scale = 5.0
    small.scale = 5.0
    close(loaded(x), small(x))
