"""Loading TVM."""

from __future__ import annotations

import subprocess
import sys
import textwrap


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
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)
