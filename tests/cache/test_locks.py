from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cache.programs import key_of
from tvmify.cache import DiskCache
from tvmify.cache.locks import locked

DIGEST = key_of(0).digest
HOLD = """
import sys
from pathlib import Path
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """Return a process that holds a lock until it is killed."""
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with DiskCache(tmp_path).building(DIGEST, 0) as is_mine:
        assert is_mine
    (path,) = (tmp_path / "locks").iterdir()
    with holder(path) as process:
        with DiskCache(tmp_path).building(DIGEST, 0.1) as is_mine:
            assert not is_mine
        process.kill()
        process.wait()
        with DiskCache(tmp_path).building(DIGEST, 1) as is_mine:
            assert is_mine
    assert path.exists()


def test_different_keys_rarely_contend(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    for number in range(2000):
        with cache.building(key_of(number).digest, 0):
            pass
    assert len(list((tmp_path / "locks").iterdir())) > 1500
    assert all(len(path.name) == len("3fa.lock") for path in (tmp_path / "locks").iterdir())


def test_threads_exclude_each_other_and_a_thread_itself_never(tmp_path: Path) -> None:
    cache, found = DiskCache(tmp_path), []

    def other() -> None:
        with cache.building(DIGEST, 0) as is_mine:
            found.append(is_mine)

    with cache.building(DIGEST, 0), cache.building(DIGEST, 0) as is_mine:
        assert is_mine
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    other()
    assert found == [False, True]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_no_waiting_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    with locked(tmp_path / "lock", 60) as is_mine:
        assert not is_mine


def test_holder_exception_propagates(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="of the build"), locked(tmp_path / "lock", 0):
        raise OSError("of the build")
    with locked(tmp_path / "lock", 0) as is_mine:
        assert is_mine


def test_failure_on_release_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def fail_to_unlock(file: int, operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flock(file, operation)

    with monkeypatch.context() as patch, locked(tmp_path / "lock", 0) as is_mine:
        assert is_mine
        patch.setattr(fcntl, "flock", fail_to_unlock)
