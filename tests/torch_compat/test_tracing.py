import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests import threads
from tvmify import tvmify
from tvmify.errors import NotCompiled, TracedElsewhere, TvmifyWarning
from tvmify.torch_compat import tracing


class Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:  # not scriptable
        return torch.relu(self.linear(x))


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(x))


def compiled(module: nn.Module, **options: object) -> nn.Module:
    options = {"cache": False, "compare": False, "strict": True} | options
    return tvmify(module.eval(), **options)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """A context in which the user exports in another thread."""
    inside, leave = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            leave.wait(60)
            return x + 1

    thread = threading.Thread(target=torch.export.export, args=(Slow(), (torch.ones(2),)))
    thread.start()
    assert inside.wait(60)
    try:
        yield
    finally:
        leave.set()
        thread.join()


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    tracing._has_warned = False
    yield
    tracing._owed.clear()
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = False


def together(calls: list[Callable[[], None]]) -> None:
    """Make each call in its own thread; check that none fails or leaves a flag of torch set."""
    threads.together(torch.inference_mode()(call) for call in calls)
    assert not torch.compiler.is_compiling()


@torch.inference_mode()
def test_threads_compile_different_modules() -> None:
    nets = [compiled(kind(), dynamic=False) for kind in (Exported, Scripted, Exported)]

    def serve(net: nn.Module, first: int) -> None:
        for rows in range(first, first + 9, 3):
            net(torch.ones(rows, 4))

    together([partial(serve, net, i + 1) for i, net in enumerate(nets)])
    assert [net.cache_info().builds for net in nets] == [3, 3, 3]


@torch.inference_mode()
def test_threads_sharing_modules_run_compiled_after_background_builds() -> None:
    options = {"dynamic": False, "strict": False, "on_miss": "background"}
    nets: list[Any] = [compiled(kind(), **options) for kind in (Exported, Scripted)]
    sizes = (1, 2)

    def call_all() -> None:
        for net, rows in itertools.product(nets, sizes):
            net(torch.ones(rows, 4))

    def serve() -> None:
        end = time.monotonic() + 300
        while any(net.cache_info().builds < len(sizes) for net in nets):
            call_all()
            assert time.monotonic() < end, [str(net.explain()) for net in nets]
            time.sleep(0.05)

    together([serve] * 4)
    before = [net.cache_info() for net in nets]
    call_all()
    after = [net.cache_info() for net in nets]
    assert [info.builds for info in after] == [len(sizes)] * len(nets)
    assert [now.hits - then.hits for now, then in zip(after, before, strict=True)] == [2, 2]


@torch.inference_mode()
def test_miss_during_user_export_runs_eager() -> None:
    net = compiled(Exported(), strict=False)
    x = torch.ones(3, 4)
    with exporting():
        with pytest.warns(TvmifyWarning, match="another thread is in torch.export"):
            net(x)
        net(x)
        assert "another thread is in" in str(net.explain())
        with pytest.raises(TracedElsewhere):
            compiled(Scripted())(x)
    net(x)
    assert net.cache_info().entries == 1


@torch.inference_mode()
def test_hit_during_user_export_runs_compiled() -> None:
    net = compiled(Scripted())
    x = torch.ones(3, 4)
    net(x)
    with exporting():
        before = net.cache_info().hits
        assert torch.equal(net(x), net(x))
        assert net.cache_info().hits == before + 2
    assert not torch.compiler.is_compiling()


@torch.inference_mode()
def test_overlapping_user_export_leaves_no_patches() -> None:
    net = compiled(Scripted())
    x = torch.ones(3, 4)
    with contextlib.ExitStack() as users:
        ours = contextlib.ExitStack()
        ours.enter_context(tracing.tracing())
        torch.compiler._is_compiling_flag = True  # as torch does meanwhile
        users.enter_context(exporting())
        torch.compiler._is_compiling_flag = False
        ours.close()
    assert torch.compiler.is_compiling()
    net(x)
    assert not torch.compiler.is_compiling()
    assert net.cache_info().builds == 1


@torch.inference_mode()
def test_stale_compiling_flag_warns_and_is_ignored() -> None:
    net = compiled(Scripted())
    torch.compiler._is_compiling_flag = True
    with pytest.warns(TvmifyWarning, match="no thread compiles"):
        net(torch.ones(3, 4))
    net(torch.ones(3, 4))
    info = net.cache_info()
    assert (info.hits, info.misses, info.builds) == (1, 1, 1)


def test_error_during_foreign_tracing_is_not_permanent() -> None:
    users = contextlib.ExitStack()
    with users, pytest.raises(TracedElsewhere) as raised, tracing.tracing():
        users.enter_context(exporting())
        raise KeyError("custom")
    assert isinstance(raised.value.__cause__, KeyError)


def test_tracing_is_reentrant() -> None:
    with tracing.tracing(), tracing.tracing():
        assert tracing.tracer_elsewhere() is None
    with exporting(), pytest.raises(NotCompiled), tracing.tracing():
        pass
    with exporting(), tracing.tracing(beside_others=True):
        pass


def test_seeding_does_not_annotate_other_threads_graphs() -> None:
    net = compiled(Exported())
    done, errors = threading.Event(), []

    def seed() -> None:
        try:
            while not done.is_set():
                torch.manual_seed(0)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=seed)
    thread.start()
    try:
        with torch.inference_mode():
            for rows in (1, 2):
                net(torch.ones(rows, 4))
    finally:
        done.set()
        thread.join()
    assert errors == []
    assert net.cache_info().entries == 2


@pytest.mark.parametrize("kind", [Exported, Scripted])
def test_swapped_parameters_are_followed(kind: type[nn.Module]) -> None:
    net = compiled(kind())
    with torch.inference_mode():
        net(torch.ones(2, 4))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    with torch.inference_mode():
        assert net(torch.ones(2, 4, dtype=torch.float64)).dtype == torch.float64
    assert net.cache_info().entries == 2
