"""Side effects of forward happen once per call, from the first call on."""

from __future__ import annotations

import builtins
import copy
import functools
import itertools
import logging
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tvmify import NotCompiled, TvmifyWarning, explain
from tvmify import tvmify as decorate

LOG = logging.getLogger("a.users.module")
SEEN: list[Any] = []
COUNTS: Counter[str] = Counter()
TABLES: dict[int, torch.Tensor] = {}
calls = 0
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)


class Printing(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("rows", x.shape[0])  # noqa: T201
        return self.last(self.first(x).relu())


class PrintingInAWrapper(Layers):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        try:
            print("rows", inputs[0].shape[0])  # noqa: T201
        except Exception:  # of any kind
            SEEN.append("an error")
        return self.last(self.first(inputs[0]).relu())


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(4, 4), Printing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.before(x))


class Logging(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOG.warning("rows %d", x.shape[0])
        return self.last(self.first(x).relu())


class Keeping(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        SEEN.append(hidden)
        return self.last(hidden)


class Counting(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COUNTS["calls"] += 1
        return self.last(self.first(x).relu())


class CountingInAVariable(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global calls  # noqa: PLW0603
        calls += 1
        return self.last(self.first(x).relu())


class Meter:
    def __init__(self) -> None:
        self.calls = 0


class Metered(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.calls += 1
        return self.last(self.first(x).relu())


class Tally:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Holding(Layers):
    """Counts its calls in an object that it holds."""

    classes = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.nested: list[Any] = [{"calls": [0]}]
        self.object = types.SimpleNamespace(counts={"calls": 0})
        self.tally, self.array = Tally(), bytearray(1)
        self.partial = functools.partial(_grown, [])

    def default(self, calls: list[int] = []) -> int:  # noqa: B006
        return _grown(calls)

    def count(self) -> int:
        if self.kind == "nested":
            self.nested[0]["calls"][0] += 1
            return self.nested[0]["calls"][0]
        if self.kind == "object":
            self.object.counts["calls"] += 1
            return self.object.counts["calls"]
        if self.kind == "slots":
            self.tally.calls += 1
            return self.tally.calls
        if self.kind == "array":
            self.array[0] += 1
            return self.array[0]
        if self.kind == "class":
            type(self).classes += 1
            return self.classes
        return {"default": self.default, "partial": self.partial}[self.kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()) * self.count()


class Advancing(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()) * next(self.numbers)


class CountingInANestedList(Layers):
    """Can be scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = [[0]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts[0][0] += 1
        return self.last(self.first(x).relu()) * self.counts[0][0]


def _grown(calls: list[int]) -> int:
    calls.append(0)
    return len(calls)


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    global calls  # noqa: PLW0603
    SEEN.clear()
    COUNTS.clear()
    TABLES.clear()
    calls = 0


def called(module: nn.Module, times: int = 3) -> Any:
    """Call a decorated module some times, check each result, and return the module."""
    fast = decorate(module.eval(), cache=False)
    with torch.no_grad():
        results = [fast(X) for _ in range(times)]
        expected = eager(module)
    for result in results:
        torch.testing.assert_close(result, expected)
    return fast


def eager(module: nn.Module) -> torch.Tensor:
    """Return the result of a call, without its side effects."""
    layers: Any = getattr(module, "inner", module)
    x = module.before(X) if hasattr(module, "before") else X  # type: ignore[operator]
    return layers.last(layers.first(x).relu())


@pytest.mark.parametrize("make", [Printing, PrintingInAWrapper, Outer])
def test_prints(make: type[nn.Module], capsys: pytest.CaptureFixture[str]) -> None:
    fast = called(make())
    assert capsys.readouterr().out == "rows 3\n" * 3
    assert not SEEN
    assert fast.cache_info().builds and not fast.cache_info().eager


def test_explain_names_the_printing_line() -> None:
    text = str(explain(called(Printing(), times=1)))
    line = Printing.forward.__code__.co_firstlineno + 1
    assert f"forward prints ({__file__}:{line})" in text


def test_prints_of_torchscript(capsys: pytest.CaptureFixture[str]) -> None:
    fast = called(torch.jit.script(Printing()))
    assert capsys.readouterr().out == "rows 3\n" * 3
    assert fast.explain()


def test_logs(caplog: pytest.LogCaptureFixture) -> None:
    called(Logging())
    messages = [record.getMessage() for record in caplog.records if record.name == LOG.name]
    assert messages == ["rows 3"] * 3


def test_disabled_logging_is_not_an_effect() -> None:
    LOG.disabled = True
    try:
        assert called(Logging()).cache_info().entries == 1
    finally:
        LOG.disabled = False


def test_tensors_kept_by_forward_are_real() -> None:
    called(Keeping())
    assert [type(kept) for kept in SEEN] == [torch.Tensor] * 3


def test_counters() -> None:
    called(Counting())
    called(CountingInAVariable())
    metered = called(Metered())
    assert COUNTS["calls"] == calls == metered.meter.calls == 3


def check_counts(module: nn.Module) -> None:
    """Check that each call counts once, from 1."""
    fast = decorate(module.eval(), cache=False)
    with torch.no_grad():
        right = module.last(module.first(X).relu())
        for number in (1, 2, 3):
            torch.testing.assert_close(fast(X), right * number)


@pytest.mark.parametrize(
    "kind", ["nested", "object", "slots", "array", "class", "default", "partial"]
)
def test_counters_wherever_they_are(kind: str) -> None:
    check_counts(Holding(kind))


@pytest.mark.filterwarnings("ignore::tvmify.TvmifyWarning")
@pytest.mark.parametrize("make", [Advancing, CountingInANestedList])
def test_each_call_counts_once(make: type[nn.Module]) -> None:
    check_counts(make())


def test_variables_of_an_outer_function() -> None:
    count = 0

    def counting(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return torch.relu(x) * 2

    fast = decorate(counting, cache=False)
    with pytest.warns(TvmifyWarning, match="forward changes 'count'"):
        for _ in range(3):
            torch.testing.assert_close(fast(X), torch.relu(X) * 2)
    assert count == 3


CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "list": ([1, 2], lambda kept: kept.insert(0, len(kept))),
    "dict": ({"a": 1, "b": 2}, lambda kept: kept.update({len(kept): 0, "a": kept.pop("a") + 1})),
    "set": ({1, 2}, lambda kept: kept.symmetric_difference_update({1, len(kept)})),
    "deque": (deque([1, 2], maxlen=3), lambda kept: kept.append(len(kept))),
    "order": (OrderedDict(a=1, b=2), lambda kept: kept.move_to_end(next(iter(kept)))),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_containers_change_as_in_eager(kind: str) -> None:
    before, change = CHANGES[kind]
    kept, expected = copy.copy(before), copy.copy(before)

    def changing(x: torch.Tensor) -> torch.Tensor:
        change(kept)
        return torch.relu(x) * 2

    fast = decorate(changing, cache=False)
    with pytest.warns(TvmifyWarning, match="forward changes 'kept'"):
        for _ in range(3):
            fast(X)
            change(expected)
    assert kept == expected
    assert list(kept) == list(expected)


def test_filling_a_cache_once_is_not_an_effect() -> None:
    def scaled(*inputs: torch.Tensor) -> torch.Tensor:
        x = inputs[0]
        if x.shape[1] not in TABLES:
            TABLES[x.shape[1]] = torch.arange(x.shape[1]).float()
        return torch.relu(x) * TABLES[x.shape[1]]

    fast = decorate(scaled, cache=False)
    for _ in range(3):
        torch.testing.assert_close(fast(X), torch.relu(X) * torch.arange(4.0))
    assert (fast.cache_info().eager, fast.cache_info().builds) == (1, 1)
    assert type(TABLES[4]) is torch.Tensor


@pytest.mark.parametrize(
    "of", [lambda kind: kind, lambda kind: (kind, "relu")], ids=["type", "key"]
)
def test_cache_for_types_of_tensors_is_not_an_effect(of: Callable[[type], Any]) -> None:
    known: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {}

    def dispatched(*inputs: torch.Tensor) -> torch.Tensor:
        function = known.setdefault(of(type(inputs[0])), torch.relu)
        return function(inputs[0]) * 2

    fast = decorate(dispatched, cache=False)
    for _ in range(3):
        torch.testing.assert_close(fast(X), torch.relu(X) * 2)
    assert (fast.cache_info().eager, fast.cache_info().builds) == (0, 1)
    assert set(known) <= {of(torch.Tensor)}


def test_reading_a_builtin_from_their_namespace_is_not_an_effect() -> None:
    namespace = vars(builtins)

    def scaled(*inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(inputs[0]) * namespace["len"](inputs)

    fast = decorate(scaled, cache=False)
    torch.testing.assert_close(fast(X), torch.relu(X))
    assert fast.cache_info().eager == 0
    assert builtins.print is print


@pytest.mark.parametrize(
    "around",
    [torch.autocast("cpu", enabled=False), torch.autograd.profiler.record_function("scaled")],
    ids=lambda around: type(around).__name__,
)
def test_decorators_of_torch_are_not_effects(around: Any) -> None:
    @around
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2

    class Net(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return scaled(inputs[0] + 1)

    fast = decorate(Net().eval(), cache=False)
    torch.testing.assert_close(fast(X), torch.relu(X + 1) * 2)
    assert (fast.cache_info().eager, fast.cache_info().builds) == (0, 1)


def test_library_caches_are_not_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(*inputs: torch.Tensor) -> torch.Tensor:
        COUNTS["calls"] += 1
        return torch.relu(inputs[0]) * 2

    monkeypatch.setattr(counted, "__module__", "transformers.some.model")
    fast = decorate(counted, cache=False)
    torch.testing.assert_close(fast(X), torch.relu(X) * 2)
    assert fast.cache_info().eager == 0


def test_unreached_print_is_not_an_effect(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def verbose(x: torch.Tensor, is_verbose: bool = False) -> torch.Tensor:
        if is_verbose:
            print("verbose")  # noqa: T201
        return torch.relu(x) * 2

    fast = decorate(verbose, cache=False)
    fast(X)
    assert fast.cache_info().eager == 0
    with pytest.warns(TvmifyWarning, match="forward prints"):
        fast(X, True)
    assert capsys.readouterr().out == "verbose\n"
    assert fast.cache_info().eager == 1


def test_strict_refuses_them() -> None:
    with torch.no_grad():
        with pytest.raises(NotCompiled, match="forward prints"):
            decorate(Printing().eval(), strict=True, cache=False)(X)
        with pytest.raises(NotCompiled, match="forward changes 'calls', which outlives the call"):
            decorate(CountingInAVariable().eval(), strict=True, cache=False)(X)
    assert calls == 0
    assert builtins.print is print


class Unsized(tuple[int, ...]):
    """A tuple without a length, as in e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_items_of_a_tuple_without_a_length_are_looked_at() -> None:
    class Widths(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.widths = Unsized((2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) * sum(self.widths[i] for i in range(2))

    module = Widths().eval()
    fast: Any = decorate(copy.deepcopy(module), cache=False, compare=False, strict=True)
    with torch.inference_mode():
        torch.testing.assert_close(fast(X), module(X))
    assert fast.cache_info().builds == 1
