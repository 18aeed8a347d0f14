"""Modules whose source file changes after the import."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from tvmify import tvmify
from tvmify.capture.scripted.scripting import CannotScript, script

SOURCE = """
import torch
from torch import nn

class Plus(nn.Module):
    def __init__(self):
        super().__init__()
        self.amount = 1

    def forward(self, x):
        return x + self.amount * 1.0
"""
X = torch.linspace(-1, 1, 6)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "edited_model", raising=False)
    path = tmp_path / "edited_model.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    "edit",
    [
        SOURCE.replace("* 1.0", "* 3.0"),
        SOURCE.replace("class Plus", "class Other(nn.Module):\n    pass\n\nclass Plus"),
        SOURCE.replace("return x", "return (x"),
    ],
    ids=["other code", "other lines", "not Python"],
)
def test_edited_source_is_not_compiled(source: Path, edit: str) -> None:
    module = importlib.import_module("edited_model").Plus().eval()
    source.write_text(edit)
    with pytest.raises(CannotScript, match="edited"):
        script(module)
    with torch.inference_mode():
        fast = tvmify(module, strict=True, cache=False)  # torch.export records what runs
        torch.testing.assert_close(fast(X), X + 1)


def test_unchanged_functions_of_new_files_are_compiled(source: Path) -> None:
    module = importlib.import_module("edited_model").Plus().eval()
    script(module)
    source.write_text(SOURCE + "\n# a comment at the end\n")
    script(module)
