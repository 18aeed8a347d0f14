"""The compiler of the system, which links what is compiled: where it is, and how it is run."""

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

#: Names of compilers, the first one that is on PATH is used.
NAMES = ("g++", "gcc", "clang++", "clang", "c++", "cc")
#: What to do without one.
INSTALL = (
    "Install a C++ compiler (on Debian and Ubuntu: apt-get install g++), or name one in the "
    "environment variable CXX."
)
#: Seconds after which a program of the system is stopped, and for which it is not run again then.
LIMIT, _PAUSE = 60.0, 600.0
#: The last lines of what such a program printed that go into a message, and their characters.
_LINES, _CHARACTERS = 3, 400

#: When a command was stopped.
_stopped: dict[tuple[str, ...], float] = {}


def find() -> list[str]:
    """Return the command of the compiler: that of CXX or CC, or the first on PATH.

    It looks at files and starts nothing.

    Raises
    ------
    BuildError
        There is none.
    """
    for variable in ("CXX", "CC"):
        if command := _split(os.environ.get(variable, "")):
            if shutil.which(command[0]) is None:
                raise BuildError(
                    f"{variable} names {command[0]!r}, which is no program on PATH",
                    f"Correct {variable} or unset it, and call refresh(). {INSTALL}",
                )
            return command
    for name in NAMES:
        if path := shutil.which(name):
            return [path]
    raise BuildError(
        "there is no C++ compiler on PATH (g++, gcc, clang), which links compiled code",
        f"{INSTALL} Then call refresh().",
    )


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)  # "ccache g++"
    except ValueError:
        return [command]


def run(command: Sequence[str], folder: Path, limit: float = LIMIT) -> None:
    """Run a program of the system to its end.

    Parameters
    ----------
    command
        The program and its arguments.
    folder
        Where it keeps temporary files.
    limit
        Seconds that it may take.

    Raises
    ------
    BuildError
        It does not start, fails, is killed, or does not end.
    """
    name = command[0]
    program = _identity(name)
    if time.monotonic() - _stopped.get(program, -_PAUSE) < _PAUSE:
        raise BuildError(
            f"{name} did not end within {limit:.0f} seconds, a short while ago",
            f"Run {name} by hand to see why, and call refresh() after {_PAUSE / 60:.0f} minutes.",
        )
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(folder)},
            start_new_session=True,  # so that what it starts is stopped with it
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise BuildError(
            f"{name} cannot be run: {error.strerror}", f"{INSTALL} Then call refresh()."
        ) from error
    try:
        printed, _ = process.communicate(timeout=limit)
    except BaseException as error:  # an interrupt, too
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
            "Look whether memory, CPU time or the size of files (ulimit -f) is limited, then call "
            "refresh().",
        )
    if process.returncode:
        raise BuildError(
            f"{name} failed with status {process.returncode}: {_end_of(printed)}",
            f"Run `tvmify doctor` to see whether {name} works here, then call refresh().",
        )


def _identity(name: str) -> tuple[str, ...]:
    """Return what changes when another program takes the place of one."""
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
