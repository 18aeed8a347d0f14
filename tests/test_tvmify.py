"""The names of the package, which are imported at their first use."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import tvmify
from tests.processes import run_python

STUB = Path(str(tvmify.__file__)).with_suffix(".pyi")


def test_type_checkers_know_the_same_names() -> None:
    body = ast.parse(STUB.read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    (exported,) = [node for node in body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(exported.value) == sorted(tvmify.__all__)
    homes = {alias.name: node.module for node in imports for alias in node.names}
    assert sorted(homes) == sorted(tvmify.__all__)
    for name in {*homes} - {"cache"}:
        assert getattr(tvmify, name) is getattr(importlib.import_module(str(homes[name])), name)
    assert set(tvmify.__all__) <= set(dir(tvmify))


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'tvmify' has no attribute 'complie'"):
        tvmify.complie  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("script", "has_torch"),
    [
        ("import tvmify; tvmify.__version__, tvmify.OptionError, tvmify.cache", False),
        ("from tvmify import CacheError, CompileOptions, errors", False),
        ("import tvmify; tvmify(lambda x: x)", True),
        ("from tvmify import *; tvmify(lambda x: x)", True),
        ("import torch, tvmify; torch.ops.tvmify.cpu_features()", True),
        ("import tvmify.runtime; import torch; torch.ops.tvmify.cpu_features()", True),
    ],
)
def test_torch_is_imported_when_it_is_needed(script: str, has_torch: bool) -> None:
    script += f"\nimport sys; sys.exit(('torch' in sys.modules) != {has_torch})"
    run_python(script)
