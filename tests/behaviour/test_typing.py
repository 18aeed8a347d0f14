"""Type checkers know what decorated objects can do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from tests.behaviour import ordinary_user
from tvmify.options import CompileOptions, Options

ROOT = Path(__file__).parents[2]


def test_user_code_passes_pyright_and_mypy() -> None:
    pytest.importorskip("mypy", reason="the extra 'dev' installs it")
    script = str(ROOT / ".ci" / "check_types.py")
    command = [sys.executable, script, sys.executable, str(ROOT)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("inference")
def test_typed_example_runs() -> None:
    net, coder, plain = ordinary_user.Net(3), ordinary_user.Coder(), ordinary_user.Plain()
    ordinary_user.use(net.eval(), coder.eval(), plain.eval())


def test_type_checkers_know_all_options() -> None:
    known = get_type_hints(CompileOptions)
    assert sorted(get_type_hints(Options)) == sorted([*known, "mode"])
