from __future__ import annotations

import gc
import sys
import threading

from tvmify.torch_compat.tracers import tracer_of, tracer_of_other_threads


def test_frames_of_other_threads_are_read_without_a_collection() -> None:
    """In Python 3.11, a collection there sometimes ended in a segmentation fault."""
    inside, leave = threading.Event(), threading.Event()

    def deep(calls: int) -> None:
        if calls:
            deep(calls - 1)
        else:
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=deep, args=(200,))
    thread.start()
    assert inside.wait(60)
    interrupted = []
    threshold = gc.get_threshold()
    gc.callbacks.append(lambda *_: interrupted.append(sys._getframe(1).f_code))
    gc.set_threshold(10)
    try:
        assert tracer_of_other_threads() is None
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.pop()
        leave.set()
        thread.join()
    assert tracer_of.__code__ not in interrupted
