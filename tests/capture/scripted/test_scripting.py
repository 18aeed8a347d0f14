from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.jit import _recursive

from tvmify.capture.scripted.scripting import CannotScript, script


class Starred(nn.Module):
    def forward(self, *tensors: Any) -> torch.Tensor:
        return tensors[0] + 1


def test_torch_keeps_no_class_that_cannot_be_scripted() -> None:
    with pytest.raises(CannotScript):
        script(nn.Sequential(Starred()))
    assert Starred not in _recursive.concrete_type_store.type_store
