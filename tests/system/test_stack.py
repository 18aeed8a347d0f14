"""A thread with a small stack runs in eager what it would have to compile."""

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

        def call_in_a_thread(size):
            threading.stack_size(size)
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            info = fast.cache_info()
            return info.eager, info.builds, info.hits

        assert call_in_a_thread(64 << 10) == (1, 0, 0)
        assert "64 KiB" in str(fast.explain())
        assert call_in_a_thread(8 << 20) == (1, 1, 0)
        assert call_in_a_thread(64 << 10) == (1, 1, 1)
    """
    run_python(program)
