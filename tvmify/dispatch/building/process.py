"""The main loop of the compiler process, which `tvmify.dispatch.building` starts."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO

import torch

from tvmify import compiler
from tvmify.artifact.settings import BuildSettings
from tvmify.dispatch.building import crossing
from tvmify.dispatch.building.crossing import Message
from tvmify.errors import NotCompiled
from tvmify.target import Target

#: If it uses more bytes of memory, it ends, and the next program starts a new process.
_MOST_MEMORY = 2 << 30
#: Seconds between two checks whether the parent is alive.
_LOOK = 5.0


def main(niceness: int) -> None:
    """Compile programs until the parent ends or closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(niceness)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):  # if memory is short, the kernel should end this process
        Path("/proc/self/oom_score_adj").write_text("500")
    torch.set_num_threads(1)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not mix with answers
    waiting: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, waiting), daemon=True).start()
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    crossing.send(answers, Message({"ready": os.getpid()}))
    while True:
        crossing.send(answers, _answer(waiting.get()))
        if _memory() > _MOST_MEMORY:
            os._exit(0)


def _listen(requests: IO[bytes], waiting: queue.SimpleQueue[Message]) -> None:
    # A thread, to notice the end of the parent during a build, too.
    try:
        while True:
            waiting.put(crossing.receive(requests))
    finally:
        os._exit(0)


def _watch(parent: int) -> None:
    # The pipe may stay open in another child that the parent forked outside Python.
    wakes = threading.Event()
    while os.getppid() == parent:
        wakes.wait(_LOOK)
    os._exit(0)


def _answer(message: Message) -> Message:
    request = message.header
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # the cached value
    try:
        crossing.enter(request["modes"])
        program = crossing.unpack(message.content)
        target = Target.parse(request["target"])
        settings = BuildSettings.from_json(request["settings"])
        artifact = compiler.compile(program, target, settings, threads=1)
    except NotCompiled as reason:
        return Message({"refused": [type(reason).__name__, list(reason.__reduce__()[1])]})
    except Exception as error:  # of any kind: the parent then compiles the program
        return Message({"failed": f"{type(error).__name__}: {error}"})
    return Message({"artifact": artifact.description()}, artifact.library)


def _memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(int(sys.argv[1]))
