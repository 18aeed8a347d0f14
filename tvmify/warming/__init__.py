"""``tvmify warmup``: compiles the programs of a service ahead of time, in several processes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tvmify.dispatch.examples import example_calls
from tvmify.dispatch.recording import Recorded, read
from tvmify.dispatch.subject import Name
from tvmify.errors import OptionError, WarmUpError
from tvmify.target import TargetOption
from tvmify.target import check as check_target

#: Where the program of a signature came from.
BUILT, LOADED, EAGER = "built", "loaded from disk", "eager"
_SECONDS_TO_END = 5.0


class Outcome(NamedTuple):
    """The outcome for one signature.

    Attributes
    ----------
    signature
        The signature, as text.
    source
        Where its program came from: ``"built"``, ``"loaded from disk"``, or ``"eager"`` if it
        cannot be compiled.
    reason
        Why it runs in eager PyTorch, or how it is compiled if not as one program; otherwise empty.
    seconds
        The duration.
    bytes
        Size of the compiled code in bytes; 0 for eager.
    """

    signature: str
    source: str
    reason: str
    seconds: float
    bytes: int

    @property
    def is_compiled(self) -> bool:
        """Whether there is compiled code for the signature."""
        return self.source != EAGER


@dataclass
class Warmed:
    """The outcomes for all signatures.

    Attributes
    ----------
    outcomes
        One per signature, in order of completion.
    notes
        Remarks, such as the number of lines that could not be read.
    """

    outcomes: list[Outcome]
    notes: list[str]

    @property
    def is_complete(self) -> bool:
        """Whether there is compiled code for every signature."""
        return all(outcome.is_compiled for outcome in self.outcomes)


def warm_cache(
    subject: str,
    *signatures: Any,
    file: str | os.PathLike[str] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    method: str | None = None,
    target: TargetOption = None,
    jobs: int | None = None,
    on_begin: Callable[[int, list[str]], object] = lambda total, notes: None,
    on_outcome: Callable[[Outcome], object] = lambda outcome: None,
) -> Warmed:
    """Compile the programs of a service into the disk cache, in several processes.

    Programs that are already on disk are not built again, so an interrupted run can be repeated.
    Nothing is timed against eager PyTorch: the service does that, with its own inputs.

    Parameters
    ----------
    subject
        ``"package.module:attribute"``: a module, a decorated function, or a function without
        arguments that returns one. The current directory is on the import path.
    *signatures
        Calls, in the forms that `warmup` takes.
    file
        A file with more signatures, which the option ``record`` or ``TVMIFY_RECORD`` wrote.
    dtype
        Of arguments in ``signatures`` that are given as bare shapes.
    device
        Of arguments in ``signatures`` that are given as bare shapes.
    method
        The method that ``signatures`` are for, if several are decorated. Only its signatures in
        the file are used.
    target
        What to build for, like the option of that name; None for the object's own target.
    jobs
        Number of processes, by default one per processor. Together they use at most one thread
        per processor.
    on_begin
        Called before the first build with the number of signatures and the notes.
    on_outcome
        Called whenever a signature is done.

    Returns
    -------
    Warmed
        The outcome of each signature. ``is_complete`` is true if all have compiled code.

    Raises
    ------
    OptionError
        ``subject`` is not a string, or the target does not exist.
    WarmUpError
        ``subject`` cannot be imported or is of another kind, or there are no signatures for it:
        record some with ``TVMIFY_RECORD``, or give shapes.
    OSError
        The file cannot be read.

    Examples
    --------
    >>> warmed = tvmify.warm_cache("service.models:make_net", [(1, 3, 224, 224)], jobs=2)
    >>> assert warmed.is_complete
    """
    if not isinstance(subject, str):
        raise OptionError(
            f"subject is a {type(subject).__qualname__}: name something that can be imported, as "
            "'package.module:attribute'; to compile in this process, call warmup"
        )
    target = check_target(target)
    notes: list[str] = []
    recorded = []
    for signature in signatures:
        for call in example_calls(signature, dtype, torch.device(device)):
            named = Name("", method or "")
            described = Recorded.of(named, call.args, call.kwargs, training=False)
            recorded.append(described.with_sizes(call.declared))
    if file is not None:
        signatures = read(Path(file))
        recorded += [r for r in signatures.found if method in (None, r.method)]
        if signatures.unreadable:
            notes.append(f"{file}: {signatures.unreadable} lines are not signatures")
    pool = _Pool(subject, target)
    try:
        first = pool.start()
        notes += first.notes
        wanted = [r for r in recorded if r.module in ("", *first.names)]
        if not wanted:
            raise WarmUpError(_nothing(subject, first.names, recorded))
        if others := len(recorded) - len(wanted):
            notes.append(f"{others} signatures are for other modules than {', '.join(first.names)}")
        on_begin(len(wanted), notes)
        outcomes = []
        for outcome in pool.run(wanted, first, jobs):
            outcomes.append(outcome)
            on_outcome(outcome)
    finally:
        pool.end()
    return Warmed(outcomes, notes)


def _nothing(subject: str, names: Iterable[str], recorded: Sequence[Recorded]) -> str:
    if not recorded:
        return "there are no signatures: give a file that TVMIFY_RECORD wrote, or shapes"
    there = ", ".join(sorted({r.module for r in recorded}))
    return f"{subject} is {', '.join(names)}, but the signatures are for {there}"


class _Pool:
    """Processes that build, each controlled by a thread of this one."""

    def __init__(self, subject: str, target: TargetOption) -> None:
        self._subject = subject
        self._target = target
        self._workers: set[_Process] = set()
        self._is_ended = False

    def start(self) -> _Process:
        """Start a process, and wait until it has created the object."""
        worker = _Process()
        self._workers.add(worker)
        worker.make(self._subject)
        return worker

    def run(
        self, recorded: Sequence[Recorded], first: _Process, jobs: int | None
    ) -> Iterable[Outcome]:
        """Yield outcomes in the order of completion; the first process is one of the workers."""
        processors = len(os.sched_getaffinity(0))
        # With the option tune, kernels are timed with as many threads as the service uses.
        threads = max(r.modes.get("threads", 1) for r in recorded) if first.threads_count else 1
        count = min(jobs or max(processors // threads, 1), len(recorded))
        waiting: queue.SimpleQueue[Recorded] = queue.SimpleQueue()
        for item in recorded:
            waiting.put(item)
        done: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()

        def drive(worker: _Process | None) -> None:
            try:
                while not self._is_ended:
                    item = waiting.get_nowait()
                    worker = worker or self.start()
                    request = {
                        "signature": item.to_json(),
                        "target": self._target,
                        "threads": max(processors // count, 1),
                    }
                    outcome = worker.ask(request)
                    if outcome is None:
                        lost = f"the process that built it ended: {worker.last_words()}"
                        done.put(Outcome(str(item), EAGER, lost, 0.0, 0))
                        worker = None
                    else:
                        done.put(Outcome(**outcome))
            except queue.Empty:
                pass
            except BaseException as error:  # of any kind: the caller's thread raises it
                done.put(error)

        for place in range(count):
            worker = first if place == 0 else None
            threading.Thread(target=drive, args=(worker,), daemon=True).start()
        for _ in recorded:
            outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome

    def end(self) -> None:
        """End all processes, even while they work."""
        self._is_ended = True
        for worker in list(self._workers):
            worker.end()


class _Process:
    """A process that runs `tvmify.warming.worker`."""

    names: list[str]
    notes: list[str]
    threads_count: bool

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            # -m adds the current directory to the path.
            [sys.executable, "-m", "tvmify.warming.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"TVMIFY_COMPARE": "0"},
            text=True,
            encoding="utf-8",
            start_new_session=True,  # so that Ctrl-C reaches only this process
        )

    def make(self, subject: str) -> None:
        """Let it create the object.

        Raises
        ------
        WarmUpError
            It failed.
        """
        answer = self.ask({"subject": subject})
        if answer is None:
            raise WarmUpError(f"{subject} cannot be created: {self.last_words()}")
        if "error" in answer:
            raise WarmUpError(answer["error"])
        self.names, self.notes = answer["names"], answer["notes"]
        self.threads_count = answer["threads_count"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request; None if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):
            return None
        return json.loads(line) if line.endswith("\n") else None

    def last_words(self) -> str:
        """Wait until it has ended, and return how."""
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return f"{how}{': ' + lines[-1] if lines else ''}"

    def end(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            with suppress(OSError):
                # First like Ctrl-C, so that it removes its temporary files.
                self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
