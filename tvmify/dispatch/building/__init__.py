"""A process with low priority that compiles in the background.

It has torch and TVM loaded, and compiles one program at a time, so that calls do not compete with
the compiler for the interpreter. `tvmify.dispatch.building.crossing` defines the messages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from tvmify import errors
from tvmify.artifact import Artifact
from tvmify.artifact.settings import BuildSettings
from tvmify.dispatch.building import crossing
from tvmify.system import forks
from tvmify.target import Target

if TYPE_CHECKING:
    from torch.export import ExportedProgram

#: What is added to its niceness: it gets a tenth of a processor that it shares.
NICENESS = 10
#: Signals of a crash of the compiler, which would have ended this process, too.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TVM_NUM_THREADS": "1"}


class Unavailable(Exception):
    """The process cannot be used; the message says why."""


class Builder:
    """The process. It starts with the first program; one thread at a time may use it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._words: IO[bytes] | None = None  # its standard error
        self._last_words = ""
        self._is_lost = self._is_stopped = False

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """The id of the process, if there is one."""
        return None if self._process is None else self._process.pid

    def build(
        self, program: ExportedProgram, target: Target, settings: BuildSettings
    ) -> Artifact | None:
        """Compile a program, as `tvmify.compiler.compile` does.

        Returns
        -------
        artifact
            None if this process has to compile it: the program cannot be serialized, or there is
            no other process.

        Raises
        ------
        NotCompiled
            The program cannot be compiled.
        """
        if self._is_lost or self._is_stopped:
            return None
        try:
            content = crossing.pack(program)
        except Exception:  # of any kind: torch cannot serialize every program
            return None
        request = {
            "target": str(target),
            "settings": settings.to_json(),
            "modes": crossing.modes(),
            "environment": dict(os.environ),
        }
        try:
            message = self._ask(crossing.Message(request, content))
        except Unavailable as problem:
            if self._is_stopped:
                return None
            self._is_lost = True
            errors.warn(
                f"programs are compiled in a thread of this process: the compiler process {problem}"
            )
            return None
        answer = message.header
        if "refused" in answer:
            name, arguments = answer["refused"]
            raise getattr(errors, name)(*arguments)
        if "artifact" not in answer:
            return None
        structure = crossing.output_structure(program)
        return Artifact.from_description(message.content, answer["artifact"] | structure)

    def end(self) -> None:
        """End the process, if there is one, and wait for it."""
        process, self._process = self._process, None
        words, self._words = self._words, None
        if words is not None:
            words.close()
        if process is None:
            return
        process.kill()
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()  # type: ignore[union-attr]
        process.wait()

    def stop(self) -> None:
        """Cancel the build of another thread, and accept no more."""
        self._is_stopped = True
        process = self._process
        if process is not None:
            process.kill()

    def abandon(self) -> None:
        """Leave the process to the parent, in a forked child."""
        process, self._process = self._process, None
        words, self._words = self._words, None
        if process is not None:
            process.returncode = 0  # it is not our child
            # Otherwise the pipes would stay open when the parent ends.
            for pipe in (process.stdin, process.stdout, words):
                if pipe is not None:
                    pipe.close()

    # ----------------------------------------------------------------------------- the process

    def _ask(self, message: crossing.Message) -> crossing.Message:
        is_old = self.is_running  # it may have ended since
        for is_last in (not is_old, True):
            if not self.is_running:
                self._start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with forks.resting():
                    crossing.send(process.stdin, message)
                    return crossing.receive(process.stdout)
            except (OSError, EOFError, ValueError):
                status = self._status()
                if not (is_last or self._is_stopped):
                    continue
                if -status in _CRASHES:
                    raise errors.BuildError(
                        f"the compiler crashed ({signal.Signals(-status).name})",
                        "Run this module in eager PyTorch, and report the program.",
                    ) from None
                raise Unavailable(f"ended with status {status}{self._last_words}") from None
        raise AssertionError  # the last iteration returns or raises

    def _start(self) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise Unavailable("has no Python to run it")
        # Relative ones, such as "" for the working directory, may mean another place by now.
        paths = [path for path in map(str, sys.path) if Path(path).is_absolute()]
        paths.append(str(Path(__file__).parents[3]))
        imports = "from tvmify.dispatch.building.process import main"
        code = f"import sys; sys.path[:] = {paths!r}; {imports}"
        self._last_words = ""
        try:
            self._words = os.fdopen(os.memfd_create("tvmify builds"), "w+b", 0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{code}; main({NICENESS})"],
                bufsize=0,  # a buffer has a lock, which a forked child may inherit locked
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                cwd="/",
                env=os.environ | _ALONE,
                start_new_session=True,  # it ignores Ctrl-C
            )
            with forks.resting():
                crossing.receive(self._process.stdout)  # type: ignore[arg-type]
        except (OSError, EOFError, ValueError, subprocess.SubprocessError, MemoryError) as error:
            status = self._status() if self.is_running else None
            self.end()
            how = f"could not be started: {error}" if status is None else f"ended with {status}"
            raise Unavailable(f"{how}{self._last_words}") from error

    def _status(self) -> int:
        """End the process, and return its exit status."""
        process = self._process
        assert process is not None
        if self._words is not None:
            size = self._words.seek(0, os.SEEK_END)
            self._words.seek(max(size - 2000, 0))
            said = self._words.read().decode(errors="replace").strip().splitlines()
            self._last_words = f" ({said[-1]})" if said else ""
        try:
            process.wait(timeout=1.0)  # its pipe closes a moment earlier
        except subprocess.TimeoutExpired:
            process.kill()
        self.end()
        return process.returncode


def can_cross(target: Target) -> bool:
    """Whether another process builds programs for a target."""
    return target.kind == "llvm" and torch.get_default_device().type == "cpu"
