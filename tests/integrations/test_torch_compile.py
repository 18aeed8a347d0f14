"""``torch.compile(model, backend="tvmify")``."""

from __future__ import annotations

import copy
import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends import registry

import tvmify
from tests.entry_points import entry_points
from tests.processes import run_python
from tests.tolerances import assert_close_to_reference
from tvmify import CacheInfo, NotCompiled, OptionError, TvmifyWarning
from tvmify.integrations.calls import GRAPHS, GraphCalls
from tvmify.integrations.torch_compile import backend

ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.gelu(self.norm(self.first(x))))


def compiled(model: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(model, backend="tvmify", **options)


def graphs() -> list[GraphCalls]:
    return sorted(GRAPHS, key=lambda graph: graph.origin.label)


def total() -> CacheInfo:
    return CacheInfo.total(
        [d.cache_info() for graph in graphs() for d in graph.dispatchers_for(None)]
    )


@pytest.fixture(autouse=True)
def _no_graphs() -> None:
    gc.collect()
    GRAPHS.clear()  # graphs of other tests may still be referenced


def test_pyproject_names_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and later have it")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (named,) = project["entry-points"]["torch_dynamo_backends"].items()
    monkeypatch.delitem(registry._COMPILER_FNS, "tvmify")
    entry = EntryPoint(*named, "torch_dynamo_backends")
    monkeypatch.setitem(registry._BACKENDS, named[0], entry)
    assert registry.lookup_backend("tvmify") is backend


def test_backend_and_logs_need_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(entry_points(tmp_path)), str(ROOT)]))
    monkeypatch.setenv("TORCH_LOGS", "tvmify")
    done = run_python(
        "import torch\n"
        "fast = torch.compile(lambda x: x + 1, backend='tvmify')\n"
        "print(fast(torch.ones(2)).tolist())\n"
        "torch.compile(lambda x: x.view(torch.int32), backend='tvmify')(torch.ones(2, 2))\n"
        "import tvmify; print(tvmify.cache_info(fast).entries)\n"
    )
    assert done.stdout.splitlines() == ["[2.0, 2.0]", "1"]
    logged = done.stderr.splitlines()
    assert any("runs in eager PyTorch" in line and "reporting.py" in line for line in logged)


@pytest.mark.usefixtures("no_grad")
def test_repeated_calls_and_new_weights_do_not_rebuild() -> None:
    net, x = Net().eval(), torch.randn(3, 8)
    fast = compiled(net)
    assert_close_to_reference(fast(x), net, (x,))
    assert_close_to_reference(fast(x), net, (x,))
    assert (total().builds, total().hits, total().eager) == (1, 1, 0)

    net.first.weight.mul_(2)  # in place
    net.norm.weight.data = torch.full((16,), 3.0)  # other memory
    net.second.weight = nn.Parameter(torch.randn(4, 16))  # another parameter
    assert_close_to_reference(fast(x), net, (x,))
    info = total()  # for these weights
    assert (info.builds, info.disk_hits, info.eager) == (0, 0, 0)
    assert "capture" not in info.seconds


@pytest.mark.usefixtures("inference")
def test_models_of_one_class_share_a_graph_and_keep_their_weights() -> None:
    nets, x = [Net().eval() for _ in range(3)], torch.randn(3, 8)
    fast = [compiled(net) for net in nets]
    for _ in range(2):
        for net, call in zip(nets, fast, strict=True):
            assert_close_to_reference(call(x), net, (x,))
    assert len(graphs()) == 1
    assert len(graphs()[0].dispatchers_for(None)) == 3
    assert total().builds == 1


def test_model_memory_is_freed_with_the_model() -> None:
    net = Net().eval()
    fast = compiled(net)
    with torch.no_grad():
        fast(torch.randn(3, 8))
    (graph,), weight = graphs(), weakref.ref(net.first.weight.untyped_storage())
    assert len(graph.dispatchers_for(None)) == 1
    del net, fast
    gc.collect()  # the model
    gc.collect()  # and what was made for it
    assert graph.dispatchers_for(None) == []
    assert weight() is None


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("dynamic", [None, True])
def test_dynamic_sizes_share_programs(dynamic: bool | None) -> None:
    net = Net().eval()
    fast = compiled(net, dynamic=dynamic)
    for rows in (3, 5, 6, 7, 9, 11, 13, 14, 5):
        x = torch.randn(rows, 8)
        assert_close_to_reference(fast(x), net, (x,))
    # One for all shapes, with static columns, or one for the first and one for all others.
    assert total().builds == (1 if dynamic else 2)
    assert total().eager == 0


@pytest.mark.usefixtures("inference")
def test_mark_dynamic_is_symbolic_from_the_first_call() -> None:
    net = Net().eval()
    fast = compiled(net)
    for rows in (3, 5, 6):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        assert_close_to_reference(fast(x), net, (x,))
    assert len(graphs()) == 1
    assert total().builds == 1


@pytest.mark.usefixtures("inference")
def test_symbolic_sizes_and_numbers_are_passed_through() -> None:
    def scaled(x: torch.Tensor, times: int, by: float) -> tuple[torch.Tensor, int, int]:
        return x * times + by, x.shape[0], times

    fast = compiled(scaled)
    for rows, times, by in ((3, 2, 0.5), (4, 3, 0.75), (5, 4, 1.25)):
        x = torch.randn(rows, 8)
        got = fast(x, times, by)
        assert got[1:] == (rows, times)
        torch.testing.assert_close(got[0], scaled(x, times, by)[0])
    assert total().eager == 0


class Mixed(Net):
    """Has regions of autocast."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.norm(self.first(x))
            with torch.autocast("cpu", enabled=False):
                exact = self.first(x)
        return hidden, exact, self.first(x)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("no_grad")
def test_regions_of_autocast_have_the_dtypes_of_eager(dynamic: bool) -> None:
    net, x = Mixed().eval(), torch.randn(3, 8)
    torch.testing.assert_close(compiled(net, dynamic=dynamic)(x), net(x))
    assert total().eager == 0


@pytest.mark.usefixtures("no_grad")
def test_code_around_a_graph_break_is_compiled() -> None:
    net = Net().eval()

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = net(x)
        if y.sum() > 0:
            return y + 1
        return torch.relu(y) - 1

    fast = compiled(broken)
    for sign in (1, -1):
        net.second.bias.fill_(sign * 100.0)
        x = torch.randn(3, 8)
        torch.testing.assert_close(fast(x), broken(x))
    assert len(graphs()) == 3
    assert total().builds == 3


@pytest.mark.usefixtures("inference")
def test_refused_graph_runs_eager_with_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.complex64) + 1

    fast, x = compiled(bits), torch.randn(3, 8)
    caplog.set_level(logging.INFO, "tvmify")
    with pytest.warns(
        TvmifyWarning, match="graph 0/0 .bits, test_torch_compile.py.*aten.view.dtype"
    ):
        got = fast(x)
    assert torch.equal(got, bits(x))
    assert torch.equal(fast(x), bits(x))
    assert total().eager == 2
    (signature,) = tvmify.explain(fast).signatures
    assert signature.runs == "eager"
    assert "aten.view.dtype" in signature.reason
    (record,) = (r for r in caplog.records if r.levelno == logging.INFO)
    assert "runs in eager PyTorch" in record.getMessage()

    torch._dynamo.reset()
    with pytest.raises(NotCompiled):
        compiled(bits, options={"strict": True})(x)


def test_empty_graph_runs_eager_silently() -> None:
    x = torch.randn(3, 8)
    assert compiled(lambda x: x[1:].t())(x).data_ptr() == x[1].data_ptr()
    assert total().eager == 1


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"options": {"compar": False}}, r"unknown option 'compar'.*compare.*did you mean"),
        ({"options": {"accuracy": "some"}}, r"'accuracy' is 'some': expected 'default' or"),
        ({"options": {"dynamic": True}}, r"unknown option 'dynamic'.*torch\.compile\(model, dyn"),
        ({"options": ["strict"]}, r"options is \['strict'\]: expected a dict"),
        ({"mode": "fastest"}, r"mode is 'fastest': expected one of default, reduce-overhead"),
    ],
)
def test_invalid_option_names_the_valid_ones(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message), torch.no_grad():
        compiled(Net().eval(), **keywords)(torch.randn(3, 8))
    assert not GRAPHS


@pytest.mark.usefixtures("inference")
def test_mode_sets_options() -> None:
    net = Net().eval()
    compiled(net, mode="max-autotune-no-cudagraphs")(torch.randn(3, 8))
    (graph,) = graphs()
    assert graph.dispatchers_for(None)[0].subject.options.tune == "quick"


@pytest.mark.usefixtures("inference")
def test_buffers_and_arguments_are_written_in_place() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = nn.Buffer(torch.zeros(8))

        def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            out.copy_(x * self.count)
            return out.sum()

    plain, other = Counting().eval(), Counting().eval()
    fast = compiled(other)
    for _ in range(3):
        x, want, got = torch.randn(3, 8), torch.zeros(3, 8), torch.zeros(3, 8)
        torch.testing.assert_close(fast(x, got), plain(x, want))
        torch.testing.assert_close(got, want)
        assert torch.equal(other.count, plain.count)
    assert total().eager == 0


@pytest.mark.filterwarnings("ignore:.*not contiguous:tvmify.TvmifyWarning")
@pytest.mark.usefixtures("inference")
def test_copies_of_non_contiguous_tensors_are_copies() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().add_(1) + x

    fast = compiled(forward)
    for x in (torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(4, 12)[:, ::2]):
        other = torch.empty_strided(x.shape, x.stride()).copy_(x)
        torch.testing.assert_close(fast(x), forward(other))
        torch.testing.assert_close(x, other)


@pytest.mark.usefixtures("inference")
def test_reset_of_dynamo_separates_earlier_graphs() -> None:
    x = torch.randn(3, 8)
    earlier = compiled(torch.sin)
    earlier(x)
    kept = graphs()  # kept alive, for example by a cycle that is not collected yet
    torch._dynamo.reset()  # the next graph gets the same number as this one
    later = compiled(lambda x: x.cos() + 1)
    later(x)
    assert [graph.origin.label.split()[1] for graph in graphs()] == ["0/0", "0/0"]
    assert tvmify.cache_info(later).misses == 1
    assert kept[0] in GRAPHS


@pytest.mark.usefixtures("no_grad")
def test_explain_and_cache_info_cover_all_graphs_of_one_model() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.net(x)
            torch._dynamo.graph_break()
            return y.view(torch.complex64) + 1

    first, second, x = Broken().eval(), Broken().eval(), torch.randn(3, 8)
    fast, other = compiled(first), compiled(second)
    assert tvmify.cache_info(fast) == CacheInfo.total([])
    assert str(tvmify.explain(fast)) == ""
    with pytest.warns(TvmifyWarning, match="view"):
        fast(x)
    fast(x)
    other(x)
    assert tvmify.cache_info(fast).builds == 1
    before, after = tvmify.explain(fast).signatures
    assert (before.runs, after.runs) == ("compiled", "eager")
    assert "aten.view.dtype" in after.reason
    with pytest.raises(TypeError, match="not decorated"):
        tvmify.explain(first)

    first.compile(backend="tvmify")
    first(x)
    assert tvmify.cache_info(first).builds == 1

    function = compiled(lambda x: x + 1)
    function(x)
    assert tvmify.cache_info(function).builds == 1


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(1))


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (Net, [(4, 8), (4, 8), (5, 8), (6, 8)]),
        (convolutions, [(2, 3, 8, 8)] * 3),
        (convolutions, [(2, 3, 8, 8), (3, 3, 8, 8), (5, 3, 8, 8)]),
    ],
)
def test_training_steps_match_eager(
    make: Callable[[], nn.Module], shapes: list[tuple[int, ...]]
) -> None:
    plain = make().train()
    other = copy.deepcopy(plain)
    fast = compiled(other)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (plain, other)]
    for shape in shapes:
        x = torch.randn(shape)
        for call, optimizer in zip((plain, fast), optimizers, strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(call(x), torch.arange(len(x)) % 4).backward()
            optimizer.step()
        for (name, want), got in zip(plain.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5, msg=name)
        for name, want in plain.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], want, rtol=1e-4, atol=1e-5)
    assert {graph.origin.label.rpartition(", ")[2] for graph in GRAPHS} == {"forward", "backward"}
    assert total().eager == 0
    assert total().builds == len(graphs())


_SECOND = """
import sys, torch
from torch import nn
from torch._dynamo import register_backend
from tvmify.integrations.calls import GRAPHS
from tvmify.integrations.torch_compile import backend
register_backend(backend, name="tvmify")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
fast = torch.compile(net, backend="tvmify")
for rows in (3, 5, 6):
    with torch.no_grad():
        fast(torch.randn(rows, 8))
fast(torch.randn(3, 8)).sum().backward()
infos = [d.cache_info() for graph in GRAPHS for d in graph.dispatchers_for(None)]
print(sum(i.builds for i in infos), sum(i.disk_hits for i in infos), sum(i.eager for i in infos))
print("tvm" in sys.modules)
"""


def test_second_process_loads_from_disk_without_tvm() -> None:
    assert run_python(_SECOND).stdout.splitlines() == ["4 0 0", "True"]
    assert run_python(_SECOND).stdout.splitlines() == ["0 4 0", "False"]


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
