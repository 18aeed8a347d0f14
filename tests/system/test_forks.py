"""Forks while other threads compile, load or run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tvmify import NotCompiled
from tvmify.cache import Key, MemoryCache
from tvmify.system import forks

START = """
import faulthandler, os, signal, sys, threading, time, torch, traceback
from torch import nn
from tvmify.dispatch.building import background
from tvmify import compiler, tvmify
from tvmify.system import forks

torch.set_num_threads(1)
torch.set_grad_enabled(False)
faulthandler.register(signal.SIGALRM, chain=True)  # says where a process hangs, and ends it
signal.alarm(100)
stages, waiting = {}, threading.Condition()
failures = []
threading.excepthook = failures.append

def reached(name):
    with waiting:
        stages[name] = stages.get(name, 0) + 1
        waiting.notify_all()

def wait_for(name):
    with waiting:
        assert waiting.wait_for(lambda: name in stages, 90)

# Eager PyTorch runs in the main thread alone: a child may inherit its locks, of the generator or of
# a weight's gradients, from a thread that holds them.
inputs = {rows: torch.randn(rows, 4) for rows in range(1, 9)}
expected = {}

def make(**options):
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    net = tvmify(plain, progress=False, cache=False, **options)
    expected[net] = {rows: plain(x) for rows, x in inputs.items()}
    return net

def in_thread(run, *args):
    thread = threading.Thread(target=run, args=args)
    thread.start()
    return thread

def in_child(run):
    child = os.fork()
    if not child:
        signal.alarm(30)  # which a child does not inherit
        code = 1
        try:
            code = 0 if run() in (None, True) else 2
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"a child ended with {code}"

def same(net, rows):
    with torch.no_grad():
        assert torch.allclose(net(inputs[rows]), expected[net][rows], atol=1e-5)
"""


def run_script(text: str) -> str:
    script = textwrap.dedent(START) + textwrap.dedent(text) + "assert not failures, failures"
    environment = os.environ | {"TVMIFY_COMPARE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_child_compiles_new_shapes() -> None:
    run_script("""
    from tvmify.dispatch.progress import Stages
    original = Stages.begin

    def noted(self, name):
        original(self, name)
        reached(name)

    Stages.begin = noted
    for rows, stage in enumerate(("export", "schedule", "build"), 2):
        stages.clear()
        a, b = make(), make()
        thread = in_thread(same, a, rows)
        wait_for(stage)

        def child():
            for net in (a, b):
                same(net, 5)
                assert net.cache_info().entries >= 1
            assert not forks.is_torn()

        in_child(child)
        thread.join()
        same(a, rows)
        assert a.cache_info().builds == 1
    """)


def test_child_forked_within_a_stage_does_not_compile() -> None:
    run_script("""
    import warnings
    net, other = make(), make()
    same(net, 2)
    forks.LONGEST_STAGE = 0.05
    go_on = threading.Event()

    def stuck(*args, **options):
        reached("compile")
        go_on.wait(60)
        raise RuntimeError("never mind")

    compiler.compile, compile = stuck, compiler.compile
    warnings.simplefilter("ignore")
    thread = in_thread(net, torch.ones(7, 4))
    wait_for("compile")

    def child():
        compiler.compile = compile
        assert forks.is_torn()
        same(net, 2)
        assert net.cache_info().entries == 1
        for rows in (7, 8):
            same(net, rows)
            same(other, rows)
        assert "forked while another thread was compiling" in str(other.explain())
        assert other.cache_info().builds == 0

    in_child(child)
    assert not forks.is_torn()
    go_on.set()
    thread.join()
    """)


@pytest.mark.thorough
def test_forks_from_several_threads_while_others_call_and_compile() -> None:
    run_script("""
    net = make()
    same(net, 1)
    same(net, 2)
    stop = threading.Event()

    def call():
        torch.set_grad_enabled(False)
        while not stop.is_set():
            for rows in (1, 2):
                same(net, rows)

    def fork():
        for _ in range(15):
            in_child(lambda: same(net, 1))
            in_child(lambda: same(net, 2))

    callers = [in_thread(call) for _ in range(2)]
    forkers = [in_thread(fork) for _ in range(2)]
    for thread in forkers:
        thread.join()
    stop.set()
    for thread in callers:
        thread.join()
    """)


def in_child(run: Callable[[], object]) -> int:
    child = os.fork()
    if not child:
        signal.alarm(20)
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def held_by_another(lock: Any) -> tuple[threading.Thread, threading.Event]:
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    return thread, go_on


@pytest.mark.parametrize("make", [forks.Lock, forks.short_lock])
def test_a_lock_of_another_thread_is_free_in_a_child(make: Callable[[], Any]) -> None:
    lock = make()
    thread, go_on = held_by_another(lock)
    try:
        assert in_child(lock.__enter__) == 0
    finally:
        go_on.set()
        thread.join()
    with lock:
        pass


def test_forking_thread_keeps_its_locks() -> None:
    lock = forks.Lock()

    def child() -> None:
        lock.__exit__()
        lock.__exit__()
        with pytest.raises(RuntimeError):
            lock.__exit__()

    with lock, lock:
        assert in_child(child) == 0


def test_short_locks_are_consistent_in_a_child() -> None:
    cache: MemoryCache[int] = MemoryCache(3)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for key in range(5):
                cache.store(key, key)
                cache.discard(key - 1)

    thread = threading.Thread(target=change)
    thread.start()

    def child() -> None:
        for key in range(20):
            cache.store(key, key)
        assert sorted(cache.values()) == [17, 18, 19]

    try:
        assert {in_child(child) for _ in range(30)} == {0}
    finally:
        stop.set()
        thread.join()


def test_a_child_names_programs_while_another_thread_of_the_parent_does() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(dict[str, str]):
        def __iter__(self) -> Iterator[str]:
            begun.set()
            go_on.wait(60)
            return super().__iter__()

    thread = threading.Thread(target=lambda: Key(Slow(program="relu")).digest)
    thread.start()
    assert begun.wait(60)
    try:
        assert in_child(lambda: Key({"program": "relu"}).digest) == 0
    finally:
        go_on.set()
        thread.join()


def test_thread_waiting_for_a_lock_does_not_delay_forks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forks, "LONGEST_STAGE", 60.0)
    lock = forks.Lock()
    begun = threading.Event()

    def wait() -> None:
        with forks.at_work():
            begun.set()
            with lock:
                pass

    thread = threading.Thread(target=wait)
    with lock:
        thread.start()
        assert begun.wait(60)
        assert in_child(lambda: None) == 0  # otherwise this would deadlock for a minute
        assert not forks.is_torn()
    thread.join()


def test_a_fork_waits_for_the_end_of_a_stage() -> None:
    seen: list[str] = []
    begun = threading.Event()

    def work() -> None:
        with forks.at_work():
            begun.set()
            time.sleep(0.2)
            seen.append("end")

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    child = os.fork()
    if not child:
        os._exit(0 if seen == ["end"] and not forks.is_torn() else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


def test_a_torn_process_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_is_torn", True)
    with pytest.raises(NotCompiled, match=r"forked while another thread was compiling.*spawn"):
        forks.refuse_if_torn()


def test_collected_locks_are_forgotten() -> None:
    lock = forks.Lock()
    reference = weakref.ref(lock)
    before = len(forks._long_locks)
    del lock
    assert reference() is None
    assert len(forks._long_locks) == before - 1
