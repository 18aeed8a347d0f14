"""The thread that builds in the background, and its process: order, priority, forks, exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from tvmify.dispatch.building import background
from tvmify.dispatch.building.background import Job, Worker


def test_builds_begin_once_a_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker, job = Worker(), Job(lambda _: "built")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            worker.submit(job)
    assert worker.submit(job) and worker.wait(60)
    assert job.result == "built"
    worker.stop()


def run_script(text: str) -> subprocess.CompletedProcess[str]:
    start = """
    import os, threading, torch
    from torch import nn
    from tvmify.dispatch.building import background
    from tvmify import tvmify
    from tvmify.dispatch.building import crossing

    begun, send = threading.Event(), crossing.send

    def noted(*args):
        begun.set()
        return send(*args)

    crossing.send = noted
    net = tvmify(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), on_miss="background")
    x = torch.ones(3, 4)
    torch.set_grad_enabled(False)
    """
    script = textwrap.dedent(start) + textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )


def test_process_exit_during_a_build(cache_directory: Any) -> None:
    result = run_script("""
    net(x)
    assert begun.wait(60)
    print("bye")
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "bye\n", "")
    assert not [path for path in cache_directory.glob("*") if len(path.name) == 64]


def test_an_interrupt_during_a_build_ends_the_process_by_its_signal() -> None:
    result = run_script("""
    import signal, time

    def build(between):
        try:
            while True:
                time.sleep(0.01)
                between()
        finally:
            exec("pass")

    job = background.Job(build)
    background.worker.submit(job)
    os.kill(os.getpid(), signal.SIGINT)
    """)
    assert result.stderr.endswith("KeyboardInterrupt\n")
    assert result.returncode == -signal.SIGINT


@pytest.mark.parametrize("is_sent", [True, False])
def test_forked_child_has_its_own_builder(is_sent: bool) -> None:
    result = run_script(f"""
    import select, signal, time

    def begin_to_send(*args):
        pid = background.worker.builder.pid
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        noted(*args)

    if not {is_sent}:
        os.environ["MORE"] = "x" * 100_000  # than a pipe holds
        crossing.send = begin_to_send
    torch.set_num_threads(1)
    net(x)
    assert begun.wait(60)
    builder = background.worker.builder
    while not {is_sent} and select.select([], [builder._process.stdin], [], 0)[1]:
        time.sleep(0.01)
    child = os.fork()
    if child and not {is_sent}:
        os.kill(builder.pid, signal.SIGCONT)
    crossing.send = send
    while not net.cache_info().entries:
        net(x)
        background.worker.wait(60)
    if child:
        assert os.waitpid(child, 0)[1] == 0
        print("both")
    """)
    assert (result.returncode, result.stdout) == (0, "both\n"), result.stderr


def test_jobs_run_sequentially_at_low_priority() -> None:
    worker = Worker(most=2)
    begun, go_on = threading.Event(), threading.Event()
    seen: list[Any] = []

    def first(_: Any) -> str:
        begun.set()
        go_on.wait(60)
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return "done"

    jobs = [Job(first), *(Job(lambda _, i=i: seen.append(i)) for i in range(3))]
    assert worker.submit(jobs[0])
    assert begun.wait(60)
    assert [worker.submit(job) for job in jobs[1:]] == [True, True, False]
    assert not worker.wait(0)
    go_on.set()
    assert worker.wait(60)
    assert seen == [os.getpriority(os.PRIO_PROCESS, 0) + background._NICENESS, 0, 1]
    assert jobs[0].is_over
    assert jobs[0].result == "done"
    worker.stop()
    assert not worker.submit(jobs[3])
