"""Loading and unloading libraries of compiled kernels."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runtime import programs
from tvmify.runtime import Executor


def mapped_libraries() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:tvmify" in line}


def test_libraries_loaded_one_after_the_other_do_not_mix():
    # glibc returns the older library for a known path, and file descriptors are reused.
    x = torch.randn(4, 16)
    for _ in range(10):
        assert torch.equal(Executor(programs.added()).call()((x,)), x + x)
        assert torch.equal(Executor(programs.squared()).call()((x,)), x * x)


def test_libraries_loaded_side_by_side_do_not_mix():
    x = torch.randn(4, 16)
    calls = [Executor(a).call() for a in (programs.added(), programs.squared()) * 5]
    for index, call in enumerate(calls):
        assert torch.equal(call((x,)), x * x if index % 2 else x + x)


def test_a_library_is_unmapped_with_its_last_user():
    gc.collect()
    before = mapped_libraries()
    executor = Executor(programs.added())
    shared = executor.share()
    call = shared.call()
    y = call((torch.randn(4, 16),))
    assert len(mapped_libraries() - before) == 1
    del executor, shared
    assert len(mapped_libraries() - before) == 1
    del call
    gc.collect()
    assert mapped_libraries() == before
    assert y.shape == (4, 16) and torch.isfinite(y).all()


def test_file_descriptors_are_closed():
    gc.collect()
    Executor(programs.added())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        Executor(programs.added()).compiled.load()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


class _Loaded(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("path", ctypes.c_char_p)]


def loaded_paths() -> list[str]:
    """Return the paths of loaded libraries, as a debugger sees them."""
    paths: list[str] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Loaded), ctypes.c_size_t, ctypes.c_void_p)
    def note(loaded, _size, _data):
        paths.append(os.fsdecode(loaded.contents.path))
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(note, None)
    return paths


def test_another_process_finds_the_file_of_a_library():
    artifact = programs.added()
    executor, before = Executor(artifact), loaded_paths()
    executor.compiled.load()
    (path,) = set(loaded_paths()) - set(before)
    program = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
    command = [sys.executable, "-c", program, path]
    seen = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
    assert seen == artifact.library


@pytest.mark.parametrize("code", [b"not a library", b"\x7fELF" + bytes(100)])
def test_invalid_library_bytes_raise(code):
    executor = Executor(programs.artifact(code))
    with pytest.raises(RuntimeError):
        executor.compiled.forward([torch.zeros(2)])


def test_the_native_object_gives_back_its_bytes_and_metadata():
    artifact = programs.added()
    compiled = Executor(artifact).compiled
    assert bytes(compiled.library().numpy()) == artifact.library
    assert compiled.metadata() == artifact.metadata()
    with pytest.raises(RuntimeError, match="no weights to pack"):
        compiled.pack([])


def test_a_script_can_hold_the_native_object():
    class Wrapper(torch.nn.Module):
        def __init__(self, compiled):
            super().__init__()
            self.compiled = compiled

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.compiled.forward([x])[0]

    x = torch.randn(4, 16)
    scripted = torch.jit.script(Wrapper(Executor(programs.added()).compiled))
    assert torch.equal(scripted(x), x + x)
