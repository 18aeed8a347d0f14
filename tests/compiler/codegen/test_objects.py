"""Object code is emitted so that no write can fail."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.script import tirx as T
from tvm.tirx.build import codegen_build

from tvmify import BuildError
from tvmify.compiler.codegen import objects, scratch
from tvmify.compiler.codegen.lowering import lower
from tvmify.system.workers import Workers


@pytest.fixture(scope="module")
def module() -> Any:
    @T.prim_func(s_tir=True)
    def double(a: T.handle, b: T.handle) -> None:
        x = T.match_buffer(a, (4,), "float32")
        y = T.match_buffer(b, (4,), "float32")
        for i in range(4):
            with T.sblock("y"):
                vi = T.axis.spatial(4, i)
                y[vi] = x[vi] * T.float32(2)

    target = tvm.target.Target("llvm")
    lowered, _ = lower(tvm.IRModule({"double": double}), target, Workers(1))
    return codegen_build(lowered, target)


def test_without_files_in_memory(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = objects.emit(module)

    def refuse(*_: Any) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert objects.emit(module) == expected


def test_without_proc(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(objects, "_OPEN_FILES", tmp_path / "fd")
    with pytest.raises(BuildError, match="from which compiled code is loaded"):
        objects.emit(module)


def test_size_bound_holds(module: Any) -> None:
    size = len(objects.emit(module))
    assert size <= objects._largest_size(str(module.inspect_source("asm")))
    assert objects._largest_size("\t.zero\t1000000\n") > 1000000


def test_output_above_the_file_size_limit_is_not_emitted(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    with pytest.raises(BuildError, match="ulimit -f"):
        objects.emit(module)


def test_truncated_library_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    command = ["g++", "-shared", "-s", "-x", "assembler", os.devnull, "-o", str(path)]
    subprocess.run(command, check=True)
    whole = path.read_bytes()
    assert objects.is_whole_library(whole)
    for length in (0, 4, 63, 64, 500, len(whole) // 2, len(whole) - 1):
        assert not objects.is_whole_library(whole[:length])
    assert not objects.is_whole_library(b"#!/bin/sh\n" + whole)


def test_a_directory_without_room_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.mkdir()
    empty.mkdir()
    reserve = scratch._reserve

    def fail_in_full(path: Path, needed: int) -> None:
        if full in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(path, needed)

    monkeypatch.setattr(scratch, "_reserve", fail_in_full)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    monkeypatch.setattr(scratch, "_OTHERS", ())
    for first in (full, tmp_path / "gone"):
        monkeypatch.setenv("TMPDIR", str(first))
        with scratch.folder(1 << 16, [empty]) as folder:
            assert folder.parent == empty and folder.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("TMPDIR", str(full))
    with pytest.raises(BuildError, match=r"full: No space.*gone: No such file.*TMPDIR"):
        scratch.folder(1 << 16).__enter__()
    assert not any(full.iterdir()) and not any(empty.iterdir())


def test_quota_is_checked_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(BuildError, match="File too large"):
            scratch.folder(1 << 21, [tmp_path]).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with scratch.folder(1 << 20, [tmp_path]) as folder:
        assert folder.is_dir()
