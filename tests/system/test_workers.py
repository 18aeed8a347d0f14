"""Functions that run in several threads, in every phase of a process."""

from __future__ import annotations

import threading

import pytest

from tests.processes import run_python
from tvmify.system.workers import Workers


def test_results_have_the_order_of_the_items() -> None:
    assert Workers(3).map(lambda item: item * item, range(20)) == [i * i for i in range(20)]
    assert Workers(3).map(str, []) == []


def test_items_run_at_once() -> None:
    barrier = threading.Barrier(3, timeout=60)
    assert sorted(Workers(3).map(lambda _: barrier.wait(), "abc")) == [0, 1, 2]


def test_the_error_of_an_item_reaches_the_caller() -> None:
    done = []

    def fail(item: int) -> None:
        done.append(item)
        raise ValueError(item)

    with pytest.raises(ValueError, match="0"):
        Workers(1).map(fail, range(5))
    assert done == [0]


def test_threads_work_after_the_main_thread_has_ended() -> None:
    program = """
        import threading

        from tvmify.system.workers import Workers

        def work():
            threading.main_thread().join()
            print(Workers(2).map(str, [1, 2]))

        threading.Thread(target=work).start()
    """
    assert run_python(program).stdout.strip() == "['1', '2']"
