import contextlib
import math
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.fx import _symbolic_trace

from tvmify import tvmify
from tvmify.torch_compat import bystanders


class Slow(nn.Module):
    """Waits while it is exported, and uses functions that torch replaces meanwhile.

    Uses locks, since an event has attributes, which a compiled forward must not change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inside, self.leave = threading.Lock(), threading.Lock()
        self.inside.acquire()
        self.leave.acquire()

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:  # not scriptable
        y = self.linear(x) * max(x.shape[0], 2)
        if self.inside.locked():
            self.inside.release()
        assert self.leave.acquire(timeout=60)
        self.leave.release()
        return y * math.pow(x.shape[0], 2)


@contextlib.contextmanager
def exporting(net: Slow) -> Iterator[nn.Module]:
    """A context in which tvmify exports in another thread."""
    compiled = tvmify(net.eval(), cache=False, compare=False, strict=True)

    def call() -> None:
        with torch.inference_mode():
            compiled(torch.ones(3, 4))

    thread = threading.Thread(target=call)
    thread.start()
    assert net.inside.acquire(timeout=60)
    try:
        yield compiled
    finally:
        net.leave.release()
        thread.join()


def test_other_threads_see_no_patches() -> None:
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    expected, weight = plain(x), plain[0].weight
    small, large = torch.tensor(1.0), torch.tensor(2.0)
    with exporting(Slow()):
        torch.testing.assert_close(plain(x), expected)
        assert plain[0].weight is weight
        with pytest.raises(AttributeError, match="no attribute 'other'"):
            _ = plain.other
        assert max(small, large) is large
        assert min(small, large) is small
        assert isinstance(math.pow(2, 3), float)
        assert not torch.compiler.is_compiling()
        assert not torch.compiler.is_exporting()
        assert not _symbolic_trace.is_fx_tracing()
        assert not _symbolic_trace.is_fx_symbolic_tracing()


def test_exporting_thread_sees_the_patches() -> None:
    net, x = Slow(), torch.randn(3, 4)
    with exporting(net) as compiled:
        pass
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), net.linear(x) * 3 * 9)
    assert compiled.cache_info().builds == 1


def test_patches_are_removed() -> None:
    asked = (torch.compiler.is_compiling, _symbolic_trace.is_fx_tracing)
    places = (max, min, math.pow, nn.Module.__call__, nn.Module.__getattr__)
    before = [function.__code__ for function in asked]
    patch_method = _symbolic_trace._Patcher.patch_method
    with exporting(Slow()):
        pass
    assert [function.__code__ for function in asked] == before
    assert places == (max, min, math.pow, nn.Module.__call__, nn.Module.__getattr__)
    assert _symbolic_trace._Patcher.patch_method is patch_method


def test_tracing_thread_is_not_a_bystander(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(bystanders.is_bystander())
            return x + 1

    monkeypatch.setattr(bystanders, "_exporting", -1)  # the id of no thread
    assert bystanders.is_bystander()
    torch.export.export(Asking(), (torch.ones(2),))
    assert seen
    assert not any(seen)
