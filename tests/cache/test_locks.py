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
from tests.processes import run_python
from tvmify.cache import DiskCache
from tvmify.cache.locks import locked

DIGEST = key_of(0).digest
HOLD = """
import fcntl
import sys
with open(sys.argv[1], "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
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


def test_a_fork_does_not_share_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    (tried, trying), (waiting, ending) = os.pipe(), os.pipe()
    with locked(path, 0):
        child = os.fork()
        if not child:
            has_it = True
            try:
                with locked(path, 0) as has_it:
                    os.write(trying, b"x")
                    os.read(waiting, 1)
            finally:
                os._exit(has_it)
        os.read(tried, 1)
    with locked(path, 0) as is_mine:
        assert is_mine
    os.write(ending, b"x")
    assert os.waitpid(child, 0)[1] == 0


def test_a_lock_is_taken_while_a_fork_waits(tmp_path: Path) -> None:
    program = f"""
        import os
        import threading
        import time
        from pathlib import Path

        from tvmify.cache.locks import locked
        from tvmify.system import forks

        begun = threading.Event()

        def work():
            with forks.at_work():
                begun.set()
                while not forks._work._forks:
                    time.sleep(0.01)
                with locked(Path({str(tmp_path / "lock")!r}), 0) as is_mine:
                    assert is_mine

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        child = os.fork()
        if not child:
            os._exit(forks.is_torn())
        thread.join()
        assert os.waitpid(child, 0)[1] == 0
    """
    run_python(program)
