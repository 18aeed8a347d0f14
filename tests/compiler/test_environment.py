"""Loading TVM."""

from __future__ import annotations

from pathlib import Path

import pytest
from tvm import base

from tests.processes import run_python
from tvmify import BuildError
from tvmify.compiler.environment import prepare_tvm


def test_tvm_without_its_compiler_is_distinguished_from_a_fault_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_tvm.cache_clear()
    monkeypatch.setattr(base, "_RUNTIME_ONLY", True)
    monkeypatch.setattr(base, "__file__", str(tmp_path / "base.py"))
    with pytest.raises(
        BuildError, match=r"without its compiler: .*libtvm_compiler\.so: cannot open"
    ):
        prepare_tvm()
    monkeypatch.setenv("TVM_USE_RUNTIME_LIB", "1")
    with pytest.raises(BuildError, match="TVM_USE_RUNTIME_LIB is 1"):
        prepare_tvm()


def test_the_compiler_is_loaded_ahead_of_the_import() -> None:
    program = """
        import sys
        from pathlib import Path

        import tvmify.runtime
        from tvmify.compiler.environment import load_ahead, prepare_tvm

        def is_loaded():
            return "libtvm_compiler" in Path("/proc/self/maps").read_text()

        assert not is_loaded()
        thread = load_ahead()
        assert load_ahead() is thread
        thread.join()
        assert is_loaded() and "tvm" not in sys.modules
        prepare_tvm()
        import tvm
        try:
            tvm.ir.Op.get("no.such.operator")
        except Exception as error:
            assert "no.such.operator" in str(error)
        else:
            raise AssertionError("errors are lost")
    """
    run_python(program)


def test_a_user_without_a_home_compiles() -> None:
    program = """
        import os
        import pwd

        from tvmify.compiler.environment import prepare_tvm

        def unknown(user):
            raise KeyError(user)

        pwd.getpwuid = unknown
        os.environ.pop("HOME", None)
        os.environ.pop("XDG_CACHE_HOME", None)
        prepare_tvm()
        assert "XDG_CACHE_HOME" not in os.environ
    """
    run_python(program)
