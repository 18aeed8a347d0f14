"""Errors of the environment are reported as such, each with a remedy."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tvmify import BuildError, TvmifyWarning, tvmify
from tvmify.dispatch.reasons import EarlierTraceback
from tvmify.system.faults import as_build_error, check_temporary_directory, environment_fault

FAULTS = {
    "ran out of disk space": OSError(errno.ENOSPC, "No space left on device", "/tmp/x"),
    "quota": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "file sizes": OSError(errno.EFBIG, "File too large"),
    "not permitted": PermissionError(errno.EACCES, "Permission denied", "/tmp"),
    "Read-only": OSError(errno.EROFS, "Read-only file system"),
    "open files": OSError(errno.EMFILE, "Too many open files"),
    "ran out of memory": MemoryError(),
    "of memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    "another thread": RuntimeError("can't start new thread"),
    "process": BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    "than Python's limit of": RecursionError("maximum recursion depth exceeded"),
    "import a package": ModuleNotFoundError("No module named 'tvm'"),
    "system error": OSError(errno.EIO, "Input/output error"),
    "open files: Check failed": RuntimeError(
        "Check failed: Cannot open file: x Too many open files"
    ),
    "noexec": RuntimeError(
        "/proc/self/fd/4: failed to map segment from shared object: not permitted"
    ),
    "ran out of memory. Free": OSError(
        "libx.so: failed to map segment from shared object: Cannot allocate memory"
    ),
    "File too large": RuntimeError("writing a compiled library to memory: File too large"),
}


@pytest.mark.parametrize("words", FAULTS)
@pytest.mark.parametrize("stage", ["capture", "build"])
def test_a_fault_of_the_environment_is_not_to_be_reported(
    words: str, stage: str, monkeypatch: pytest.MonkeyPatch, inference: None
) -> None:
    def fail(*_: Any, **settings: Any) -> None:
        raise FAULTS[words]

    place = "dispatch.attempt.capture" if stage == "capture" else "compiler._compile"
    monkeypatch.setattr(f"tvmify.{place}", fail)
    net, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    fast: Any = tvmify(net, target="llvm", cache=False)
    with pytest.warns(TvmifyWarning) as said:
        assert torch.equal(fast(x), net(x))
    message = str(said[0].message)
    assert words in message and "refresh()" in message and "eport" not in message


@pytest.mark.parametrize("error", [KeyError("gv"), IndexError(), AssertionError("x")])
@pytest.mark.parametrize("place", ["dispatch.attempt.capture", "compiler._compile"])
def test_any_other_error_says_its_type_and_where(
    error: Exception, place: str, monkeypatch: pytest.MonkeyPatch, inference: None
) -> None:
    def fail(*_: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(f"tvmify.{place}", fail)
    net, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    with pytest.warns(TvmifyWarning, match=f"(failed|stage).*: {type(error).__name__}.* [Rr]eport"):
        assert torch.equal(tvmify(net, target="llvm", cache=False)(x), net(x))
    with pytest.raises(BuildError) as raised:
        tvmify(net, target="llvm", cache=False, strict=True)(x)
    assert isinstance(raised.value.__cause__, EarlierTraceback)
    assert type(error).__name__ in str(raised.value.__cause__)


def test_errors_of_options_and_of_the_gpu_reach_the_caller() -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), BuildError("a", "b")):
        with pytest.raises(type(error)) as raised, as_build_error("compiling it"):
            raise error
        assert raised.value is error
    assert environment_fault(BuildError("a", "b"), "compiling it") is None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.ENOENT])
def test_why_no_temporary_file_can_be_written(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **settings: Any) -> None:
        raise OSError(number, os.strerror(number))

    for name in ("gettempdir", "TemporaryFile"):
        monkeypatch.setattr(tempfile, name, fail)
    expected = {
        errno.EMFILE: "open files",
        errno.ENOSPC: "disk space",
        errno.ENOENT: "no directory",
    }
    with pytest.raises(BuildError, match=expected[number]):
        check_temporary_directory()


def test_out_of_memory_for_weights_keeps_the_cache_entry(
    cache_directory: Path, monkeypatch: pytest.MonkeyPatch, inference: None
) -> None:
    net, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    tvmify(net, target="llvm", compare=False)(x)
    before = sorted(cache_directory.iterdir())

    def fail(*_: Any) -> None:
        raise FAULTS["of memory"]

    fast: Any = tvmify(net, target="llvm", compare=False)
    with monkeypatch.context() as patch:
        patch.setattr("tvmify.runtime.Executor.bind", fail)
        with pytest.warns(TvmifyWarning, match="ran out of memory"):
            assert torch.equal(fast(x), net(x))
    assert sorted(cache_directory.iterdir()) == before
    fast.refresh()
    fast(x)
    assert fast.cache_info().builds == 0 and fast.cache_info().entries == 1
