"""Object files: undefined symbols are read, and files for data are written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tvmify.compiler.codegen.elf import CannotLink, undefined, with_data
from tvmify.compiler.codegen.elf.objects import read


def test_undefined_symbols(tmp_path: Path) -> None:
    source, made = tmp_path / "x.s", tmp_path / "x.o"
    source.write_text(".globl here\nhere: .quad elsewhere, here, matmul.7\nlocal: .quad local\n")
    subprocess.run(["g++", "-c", source, "-o", made], check=True)
    assert set(undefined(made.read_bytes())) == {"elsewhere", "matmul.7"}


def test_data_is_one_symbol_that_a_system_linker_takes(tmp_path: Path) -> None:
    empty, made, library = (tmp_path / name for name in ("empty.o", "data.o", "data.so"))
    subprocess.run(["g++", "-c", "-x", "c", "/dev/null", "-o", empty], check=True)
    made.write_bytes(with_data("some_data", b"0123456789", empty.read_bytes()))
    symbols = read(made.read_bytes()).symbols
    assert [(s.name, s.value, s.size) for s in symbols[1:]] == [("some_data", 0, 10)]
    subprocess.run(["g++", "-shared", "-Wl,--fatal-warnings", made, "-o", library], check=True)
    assert b"0123456789" in library.read_bytes()


def test_truncated_object_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.o"
    subprocess.run(["g++", "-c", "-x", "c", "/dev/null", "-o", empty], check=True)
    whole = with_data("x", bytes(100), empty.read_bytes())
    for length in range(len(whole)):
        with pytest.raises(CannotLink, match="not an object file"):
            read(whole[:length])
