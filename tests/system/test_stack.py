"""A thread with a small stack runs calls in eager that it would have to compile."""

from __future__ import annotations

from tests.processes import run_python


def test_a_small_stack_does_not_overflow() -> None:
    program = """
        import threading
        import warnings

        import torch
        from torch import nn

        from tvmify import tvmify

        warnings.simplefilter("ignore")
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval()
        fast, x = tvmify(net, cache=False), torch.ones(2, 8)

        def call():
            with torch.no_grad():
                torch.testing.assert_close(fast(x), net(x))

        def call_in_a_thread():
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

        def counts():
            info = fast.cache_info()
            return info.eager, info.builds, info.hits

        threading.stack_size(64 << 10)
        call_in_a_thread()
        assert counts() == (1, 0, 0) and "64 KiB" in str(fast.explain())
        call()  # compiles, in more threads
        assert counts() == (1, 1, 0)
        call_in_a_thread()
        assert counts() == (1, 1, 1) and threading.stack_size() == 64 << 10
    """
    run_python(program)
