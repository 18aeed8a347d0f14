"""The processes of the contenders; one runs at a time."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.results import Result

PATIENCE = 900  # seconds: no compiler takes longer for these models


def answer_of(command: list[str], environment: Mapping[str, str]) -> Any:
    """Run a process with these environment variables added; return the JSON in its last line."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode:
        raise SystemExit("a process ended; see its error above")
    return json.loads(done.stdout.splitlines()[-1])


class WorkerError(Exception):
    """A contender cannot run; the message says why."""


class Worker:
    """The process of one contender on one model, stopped except while it answers.

    Parameters
    ----------
    command
        The command that starts it.
    folder
        The folder of its caches, and of the files that contenders share.
    contender
        Its name, also of its own files in that folder.
    threads
        The number of CPU threads that it may use; None for no limit.
    """

    def __init__(
        self, command: list[str], folder: Path, contender: str, threads: int | None = None
    ) -> None:
        environment = os.environ | {
            "TVMIFY_CACHE_DIR": str(folder / contender),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / contender),
            "HF_HUB_OFFLINE": "1",
        }
        if threads is not None:
            environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        # Read only if the process ends without an answer.
        self.log = folder / f"{contender}.log"
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,  # compilers' child processes stop and end with it
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._signal(signal.SIGKILL)
        with self.process:  # closes the pipes and waits
            pass

    def burst(self) -> dict[str, Any]:
        """Measure one burst of calls.

        Raises
        ------
        WorkerError
            The process ended, or reported a failure.
        """
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `answer` reports it
            print(file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self, patience: float = PATIENCE) -> dict[str, Any]:
        """Wait `patience` seconds at most for a line, then stop the process; raises as `burst`."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(max(patience, 0)):
                raise WorkerError(f"no answer in {patience:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(self._end())
        answer = json.loads(line)
        if "reason" in answer:
            raise WorkerError(answer["reason"])
        self._signal(signal.SIGSTOP)
        return answer

    def _end(self) -> str:
        code = self.process.wait()
        if code < 0:
            return f"the process died: {signal.Signals(-code).name}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the process ended with {code}"

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def take_turns(
    workers: dict[str, Worker],
    results: Mapping[str, Result],
    rounds: int,
    on_round: Callable[[int], object] = lambda number: None,
) -> None:
    """Let workers measure a burst each, in turns, and keep the answers; drop those that fail.

    Parameters
    ----------
    workers, results
        By the names of the contenders.
    rounds
        The number of bursts of each.
    on_round
        Called with the number of each round as it begins.
    """
    for number in range(rounds):
        on_round(number)
        for name, worker in list(workers.items()):
            try:
                answer = worker.burst()
            except WorkerError as error:
                results[name].reason = str(error)
                del workers[name]
                continue
            results[name].peak_mib = answer.pop("peak_mib")
            results[name].bursts.append(answer)
