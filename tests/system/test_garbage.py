from __future__ import annotations

import gc
import threading

import pytest

from tvmify.system.garbage import uncollected


def test_last_thread_enables_the_collector() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with uncollected():
            inside.set()
            go_on.wait(60)

    thread = threading.Thread(target=elsewhere)
    with uncollected():
        thread.start()
        assert inside.wait(60)
    assert not gc.isenabled()
    go_on.set()
    thread.join(60)
    assert gc.isenabled()


def test_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_after_an_error_they_are_on() -> None:
    with pytest.raises(ZeroDivisionError), uncollected():
        _ = 1 / 0
    assert gc.isenabled()
