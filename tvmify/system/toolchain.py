"""Finds and runs the system's C++ compiler, which links compiled code."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tvmify.errors import BuildError

#: Names of compilers; the first one on PATH is used.
NAMES = ("g++", "gcc", "clang++", "clang", "c++", "cc")
#: What to do without one.
INSTALL = (
    "Install a C++ compiler (on Debian and Ubuntu: apt-get install g++), or name one in the "
    "environment variable CXX."
)
#: Timeout of a system program in seconds, and how long it is not run again after that.
LIMIT, _PAUSE = 60.0, 600.0
#: How many of the last lines and characters of its output go into a message.
_LINES, _CHARACTERS = 3, 400

#: When each command was last stopped.
_stopped: dict[tuple[str, ...], float] = {}


def find() -> list[str]:
    """Return the compiler command from CXX or CC, or the first compiler on PATH.

    This does not start any process.

    Raises
    ------
    BuildError
        There is none.
    """
    for variable in ("CXX", "CC"):
        if command := _split(os.environ.get(variable, "")):
            if shutil.which(command[0]) is None:
                raise BuildError(
                    f"{variable} names {command[0]!r}, which is not a program on PATH",
                    f"Correct or unset {variable}, and call refresh(). {INSTALL}",
                )
            return command
    for name in NAMES:
        if path := shutil.which(name):
            return [path]
    raise BuildError(
        "there is no C++ compiler on PATH (g++, gcc, clang) to link compiled code",
        f"{INSTALL} Then call refresh().",
    )


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)  # "ccache g++"
    except ValueError:
        return [command]


def run(command: Sequence[str], folder: Path, limit: float = LIMIT) -> None:
    """Run a system program and wait for it to end.

    Parameters
    ----------
    command
        The program and its arguments.
    folder
        Directory for its temporary files.
    limit
        Timeout in seconds.

    Raises
    ------
    BuildError
        It does not start, fails, is killed, or times out.
    """
    name = command[0]
    program = _identity(name)
    if time.monotonic() - _stopped.get(program, -_PAUSE) < _PAUSE:
        raise BuildError(
            f"{name} recently did not end within {limit:.0f} seconds",
            f"Run {name} by hand to see why, and call refresh() after {_PAUSE / 60:.0f} minutes.",
        )
    process = _start(command, folder)
    try:
        printed, _ = process.communicate(timeout=limit)
    except BaseException as error:  # including KeyboardInterrupt
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        _stopped[program] = time.monotonic()
        raise BuildError(
            f"{name} did not end within {limit:.0f} seconds, and was stopped",
            f"Run {name} by hand to see why, then call refresh().",
        ) from error
    finally:
        assert process.stdout is not None
        process.stdout.close()
    if process.returncode < 0:
        raise BuildError(
            f"{name} was killed by {_signal_name(-process.returncode)}",
            "Check the limits for memory, CPU time and file sizes (ulimit -f), then call "
            "refresh().",
        )
    if process.returncode:
        raise BuildError(
            f"{name} failed with status {process.returncode}: {_end_of(printed)}",
            f"Run `tvmify doctor` to see whether {name} works here, then call refresh().",
        )


def _start(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(folder)},
            start_new_session=True,  # so that its child processes are stopped with it
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise BuildError(
            f"{command[0]} cannot be run: {error.strerror}", f"{INSTALL} Then call refresh()."
        ) from error


def _identity(name: str) -> tuple[str, ...]:
    """Return a value that changes when the program is replaced by another."""
    try:
        status = Path(shutil.which(name) or name).stat()
    except OSError:
        return (name,)
    return name, str(status.st_ino), str(status.st_mtime_ns)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end_of(printed: bytes) -> str:
    lines = [line.strip() for line in printed.decode(errors="replace").splitlines()]
    said = "; ".join([line for line in lines if line][-_LINES:])
    return said[-_CHARACTERS:].rstrip(".") or "it says nothing"
