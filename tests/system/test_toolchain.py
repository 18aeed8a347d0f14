"""Compilers that are missing, hang, fail, or give a wrong result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tvmify import BuildError, TvmifyWarning, tvmify
from tvmify.cache import DiskCache
from tvmify.dispatch.building import background
from tvmify.system import toolchain

OUTPUT = 'while [ "$1" != -o ]; do shift; done; '
# Faults of a linker, and the reason for each.
FAULTS = {
    "prints junk": (OUTPUT + 'echo junk > "$2"', "made no shared library"),
    "makes nothing": ("exit 0", "made no shared library"),
    "makes a part": (
        f'g++ "$@"; {OUTPUT} truncate -s 9000 "$2"',
        "made no shared library",
    ),
    "makes another library": (
        OUTPUT + 'echo "int f(){return 1;}" | g++ -x c++ -shared -fPIC -o "$2" -',
        "cannot be run",
    ),
    "fails": ("echo ld: cannot find -lm >&2; exit 1", "failed with status 1: ld: cannot find -lm"),
    "is killed": ("kill -9 $$", "was killed by SIGKILL"),
    "meets a limit": ('ulimit -f 1; exec g++ "$@"', "File size limit exceeded"),
    "hangs": ("sleep 600", "did not end within 1 seconds, and was stopped"),
}


@pytest.fixture
def linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(program: str) -> Path:
        path = tmp_path / "linker"
        path.write_text(f"#!/bin/sh\n{program}\n")
        path.chmod(0o700)
        monkeypatch.setenv("CXX", str(path))
        monkeypatch.setenv("TVMIFY_SYSTEM_LINKER", "1")
        return path

    monkeypatch.setattr(toolchain, "_stopped", {})
    return make


@pytest.mark.parametrize("fault", FAULTS)
def test_output_of_a_bad_linker_is_neither_used_nor_stored(
    fault: str,
    linker: Any,
    cache_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    inference: None,
) -> None:
    program, reason = FAULTS[fault]
    path = linker(program)
    run = toolchain.run
    limit = 1 if fault == "hangs" else 60
    monkeypatch.setattr(toolchain, "run", lambda *args: run(*args, limit))
    net, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    fast: Any = tvmify(net, target="llvm")
    with pytest.warns(TvmifyWarning, match="refresh") as said:
        assert torch.equal(fast(x), net(x))
    assert reason in str(said[0].message) and "report" not in str(said[0].message)
    assert reason in str(fast.explain())
    assert fast.cache_info().builds == 0
    assert DiskCache(cache_directory).entries() == []
    path.write_text('#!/bin/sh\necho "ld: warning: something" >&2; exec g++ "$@"\n')
    fast.refresh()
    assert torch.allclose(fast(x), net(x), atol=1e-5)
    assert fast.cache_info().builds == 1
    assert len(DiskCache(cache_directory).entries()) == 1


@pytest.mark.parametrize("fault", ["prints junk", "makes another library"])
def test_bad_linker_in_the_background(
    fault: str, linker: Any, cache_directory: Path, inference: None
) -> None:
    program, reason = FAULTS[fault]
    linker(program)
    net, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    fast: Any = tvmify(net, target="llvm", on_miss="background")
    assert torch.equal(fast(x), net(x))
    assert background.worker.wait(120)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert torch.equal(fast(x), net(x))
    assert any(reason in str(warning.message) for warning in said)
    assert "runs in eager PyTorch" in str(fast.explain())
    assert DiskCache(cache_directory).entries() == []


def test_hanging_linker_is_killed_and_not_retried(linker: Any, tmp_path: Path) -> None:
    path = linker(f"sleep 600 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(BuildError, match="was stopped"):
        toolchain.run([str(path)], tmp_path, 1)
    child = int((tmp_path / "child").read_text())
    for _ in range(200):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            break
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("what the linker started goes on")
    path.with_name("child").unlink()
    with pytest.raises(BuildError, match="recently did not end"):
        toolchain.run([str(path)], tmp_path, 1)
    assert not (tmp_path / "child").exists()


def test_a_command_of_several_words(monkeypatch: pytest.MonkeyPatch, inference: None) -> None:
    monkeypatch.setenv("CXX", "env LANG=C g++")
    monkeypatch.setenv("TVMIFY_SYSTEM_LINKER", "1")
    net, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    fast: Any = tvmify(net, target="llvm", cache=False)
    assert torch.allclose(fast(x), net(x), atol=1e-5)
    assert fast.cache_info().builds == 1


def test_missing_compiler_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inference: None
) -> None:
    monkeypatch.setenv("TVMIFY_SYSTEM_LINKER", "1")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    net, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    fast: Any = tvmify(net, target="llvm", cache=False)
    with pytest.warns(TvmifyWarning, match=r"no C\+\+ compiler on PATH.*apt-get install g\+\+"):
        assert torch.equal(fast(x), net(x))
    assert "report" not in str(fast.explain())


@pytest.mark.parametrize("limit", [0, 8192])
def test_a_limit_for_files_ends_in_eager_in_all_threads(limit: int, cache_directory: Path) -> None:
    program = f"""
import resource, threading, warnings
import torch
from torch import nn
from tvmify import tvmify
warnings.simplefilter("always")
nets = [nn.Linear(3 + i, 2).eval() for i in range(2)]
fasts = [tvmify(net, target="llvm") for net in nets]
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
def call(i):
    with torch.inference_mode():
        x = torch.randn(4, 3 + i)
        assert torch.equal(fasts[i](x), nets[i](x))
        print("as eager")
threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.count("as eager")) == (0, 2), done.stderr
    assert "report" not in done.stderr.lower() and "runs in eager" in done.stderr
