"""Typical user code runs; `make wheel` checks its types with pyright and mypy."""

from __future__ import annotations

from typing import get_type_hints

import pytest

from tests.behaviour import ordinary_user
from tvmify.options import CompileOptions, Options


@pytest.mark.usefixtures("inference")
def test_typed_example_runs() -> None:
    net, coder, plain = ordinary_user.Net(3), ordinary_user.Coder(), ordinary_user.Plain()
    ordinary_user.use(net.eval(), coder.eval(), plain.eval())


def test_type_checkers_know_all_options() -> None:
    known = get_type_hints(CompileOptions)
    assert sorted(get_type_hints(Options)) == sorted([*known, "mode"])
