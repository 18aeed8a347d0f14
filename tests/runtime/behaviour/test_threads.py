"""Compiled code on several threads: the caller's, PyTorch's, and threads lost in a fork."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tests.processes import run_python
from tests.runtime import programs
from tvmify.runtime import Executor, PackedWeights

Result = TypeVar("Result")


def in_a_new_thread(function: Callable[[], Result]) -> Result:
    """Call it in a new thread: after a loop that waited, a thread may run the next ones alone."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_many_threads_share_one_executor():
    executor = Executor(programs.linear())
    weight, bias = torch.randn(8, 16), torch.randn(8)
    executor.bind([weight, bias], PackedWeights())
    call = executor.call()
    inputs = [torch.randn(4, 16) for _ in range(8)]
    expected = [call((x,)) for x in inputs]
    start = threading.Barrier(8)

    def work(mine: int) -> bool:
        start.wait()
        return all(torch.equal(call((inputs[mine],)), expected[mine]) for _ in range(2000))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_weight_updates_are_atomic_to_running_threads():
    executor = Executor(programs.linear())
    x = torch.ones(4, 16)
    choices = [(torch.full((8, 16), float(n)), torch.full((8,), float(n))) for n in range(3)]
    executor.bind(choices[0], PackedWeights())
    call = executor.call()
    over = threading.Event()

    def results() -> set[float]:
        seen: set[float] = set()
        while not over.is_set():
            seen.update(call((x,)).unique().tolist())
        return seen

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(results) for _ in range(3)]
        for turn in range(300):
            executor.bind(choices[turn % 3], PackedWeights())
        over.set()
    # With the weight of one choice and the bias of another the sum would be in between.
    assert set().union(*(future.result() for future in futures)) <= {0.0, 17.0, 34.0}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_loops_run_on_as_many_threads_as_torch_says(count, thread_count, on_task):
    seen: dict[int, int] = {}
    together = threading.Barrier(count)

    def work(index: int) -> None:
        if threading.get_ident() not in seen.values():
            together.wait(60)  # otherwise the first threads could finish before the last one starts
        seen[index] = threading.get_ident()

    def calling() -> int:
        assert torch.equal(call((x,)), x)
        return threading.get_ident()

    on_task(work)
    thread_count(count)
    x = torch.randn(8)
    call = Executor(programs.tasks()).call()
    caller = in_a_new_thread(calling)
    assert sorted(seen) == list(range(8))
    assert len(set(seen.values())) == count
    assert caller in seen.values()


def test_threads_do_not_pile_up(thread_count):
    thread_count(2)
    call = Executor(programs.tasks()).call()
    x = torch.randn(8)
    call((x,))

    def threads_of_this_process() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = threads_of_this_process()
    for _ in range(100):
        thread = threading.Thread(target=call, args=((x,),))
        thread.start()
        thread.join()
    until = time.monotonic() + 60
    while threads_of_this_process() >= before + 10 and time.monotonic() < until:
        time.sleep(0.01)  # OpenMP's threads end a while after their master thread
    # TVM's own pool would have left a thread or more for each.
    assert threads_of_this_process() < before + 10


@pytest.mark.parametrize("count", [1, 3])
def test_the_error_of_a_task_reaches_the_caller(count, thread_count, on_task):
    def fail(index: int) -> None:
        raise ValueError(f"task {index} failed on purpose")

    thread_count(count)
    executor = Executor(programs.tasks())
    call = executor.call()
    x = torch.randn(8)
    on_task(fail)
    with pytest.raises(RuntimeError, match=r"task \d failed on purpose"):
        executor.compiled.forward([x])
    on_task(lambda index: None)
    assert torch.equal(call((x,)), x)


@pytest.mark.parametrize("count", [1, 3])
def test_barrier_is_a_clear_error(count, thread_count):
    # There are more tasks than threads, so a task that waits for another may wait forever.
    thread_count(count)
    with pytest.raises(RuntimeError, match="barrier between tasks"):
        Executor(programs.meeting()).compiled.forward([torch.randn(8)])


def test_late_thread_leaves_its_tasks_to_others(thread_count, on_task):
    done: list[int] = []
    others = threading.Event()

    def work(index: int) -> None:
        if index == 0:  # the first of this thread's own tasks: the other thread runs all later ones
            assert others.wait(60)
        done.append(index)
        if len(done) == 7:
            others.set()

    thread_count(2)
    on_task(work)
    x = torch.randn(8)
    call = Executor(programs.tasks()).call()
    assert torch.equal(in_a_new_thread(lambda: call((x,))), x)
    assert done[-1] == 0
    assert sorted(done) == list(range(8))


def test_slow_helpers_are_suspended(thread_count, on_task):
    def changes() -> int:
        """How often loops changed from two threads to the caller alone or back, at most 4."""
        caller = threading.get_ident()
        seen: set[int] = set()

        def work(index: int) -> None:
            seen.add(threading.get_ident())
            # The other thread is slow, as if another process used its core.
            time.sleep(0.0001 if threading.get_ident() == caller else 0.03)

        on_task(work)
        turns: list[bool] = []  # whether alone
        until = time.monotonic() + 60
        while len(turns) < 5 and time.monotonic() < until:
            seen.clear()
            assert torch.equal(call((x,)), x)
            if turns[-1:] != [seen == {caller}]:
                turns.append(seen == {caller})
        return len(turns) - 1

    thread_count(2)
    x = torch.randn(8)
    call = Executor(programs.tasks()).call()
    assert in_a_new_thread(changes) == 4


def test_helpers_return_for_a_long_loop(thread_count, on_task):
    def helped() -> tuple[bool, bool]:
        """Whether a loop began with the caller alone, and whether another thread joined it."""
        caller = threading.get_ident()
        seen: set[int] = set()
        other = threading.Event()
        alone = long = False

        def work(index: int) -> None:
            nonlocal alone
            seen.add(threading.get_ident())
            if threading.get_ident() != caller:
                other.set()
                time.sleep(0.03)
            elif long and index == 0:
                end = time.thread_time() + 0.01
                while time.thread_time() < end:
                    pass
                alone = not other.is_set()
            elif long:
                other.wait(
                    10
                )  # otherwise this thread could finish before the other one gets a core

        def run() -> None:
            seen.clear()
            assert torch.equal(call((x,)), x)

        on_task(work)
        until = time.monotonic() + 60
        while not alone and time.monotonic() < until:
            while seen != {caller} and time.monotonic() < until:
                run()
            other.clear()
            long = True
            run()  # with the other thread from the start, if the pause is over
            long = False
        return alone, other.is_set()

    thread_count(2)
    x = torch.randn(8)
    call = Executor(programs.tasks()).call()
    assert in_a_new_thread(helped) == (True, True)


def test_the_interpreter_runs_on_while_kernels_do(thread_count, on_task):
    # A task waits for another Python thread, which could not continue if the call held the GIL.
    thread_count(1)
    ready = threading.Event()
    other = threading.Thread(target=ready.set)
    met: list[bool] = []

    def wait(index: int) -> None:
        if index == 0:
            other.start()
            met.append(ready.wait(60))

    on_task(wait)
    Executor(programs.tasks()).call()((torch.randn(8),))
    other.join()
    assert met == [True]


def test_a_forked_child_runs_compiled_code():
    script = """
        import os, sys
        import torch
        from tests.runtime import programs
        from tvmify.runtime import Executor

        torch.set_num_threads(2)
        call = Executor(programs.tasks()).call()
        x = torch.arange(8.0)
        assert torch.equal(call((x,)), x)  # OpenMP's threads exist from now on, in the parent
        child = os.fork()
        if child == 0:
            seen = set()
            import threading
            programs.on_task = lambda index: seen.add(threading.get_ident())
            right = torch.equal(call((x,)), x) and seen == {threading.get_ident()}
            os._exit(0 if right else 1)
        status = os.waitpid(child, 0)[1]
        sys.exit(os.waitstatus_to_exitcode(status) or not torch.equal(call((x,)), x))
    """
    # In a separate process with a time limit: the test is that nothing waits forever.
    run_python(script)
