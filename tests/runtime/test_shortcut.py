"""A call goes straight to the latest one only if nothing else would run in between."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tests.processes import run_python
from tvmify import tvmify
from tvmify.decorate.methods import shortcut
from tvmify.runtime import Shortcut

PLACE = "_the_dispatcher"
X = torch.ones(3)


class Slow(nn.Module):
    """Returns a result that shows which path a call took."""

    def forward(self, x: Any) -> Any:
        return x + 1

    _compiled_call_impl = shortcut(PLACE, forward)


class Latest:
    """Stands for a `LatestCall`."""

    def __init__(self, result: Any = "latest") -> None:
        self.result = result
        self.calls: list[Any] = []

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((args, kwargs))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def module_of(cls: type[nn.Module] = Slow, latest: Any = None) -> Any:
    module = cls()
    dispatcher = SimpleNamespace(module=weakref.ref(module), latest=latest or Latest())
    module.__dict__[PLACE] = dispatcher
    return module


def test_call_reaches_latest_call_with_its_arguments():
    latest = Latest()
    module = module_of(latest=latest)
    assert module(1) == module(x=2) == module(1, y=X) == "latest"
    assert latest.calls == [((1,), {}), ((), {"x": 2}), ((1,), {"y": X})]


def test_fast_path_runs_no_python(inference: None):
    net = tvmify(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval())
    x = torch.ones(2, 4)
    for _ in range(3):
        expected = net(x)
    seen: list[str] = []
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_filename + event))
    try:
        result = net(x)
    finally:
        sys.setprofile(None)
    assert not [name for name in seen if "tvmify" in name and name.endswith("call")]
    assert any(name.endswith("module.pycall") for name in seen)  # otherwise nothing was recorded
    assert torch.equal(result, expected)


def test_unmatched_call_uses_the_regular_path():
    assert module_of(latest=Latest(NotImplemented))(1) == 2


def test_its_errors_reach_the_caller():
    with pytest.raises(ValueError, match="too large"):
        module_of(latest=Latest(ValueError("too large")))(1)


def test_errors_of_forward_reach_the_caller():
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        module_of(latest=Latest(NotImplemented))()


class Mixed(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"y": x + 1, "size": x.shape[0]}


def test_warnings_of_pytorch_are_not_held_back_until_its_end(inference: None):
    # TorchScript's warnings about this dict are silenced at their source; others fail the test.
    assert tvmify(Mixed().eval(), strict=True)(X)["size"] == 3


def test_without_dispatcher():
    assert Slow()(1) == 2
    module = module_of()
    module.__dict__[PLACE] = None  # as in new copies and unpickled modules
    assert module(1) == 2


def test_shallow_copy_has_no_shortcut():
    module = module_of()
    copied = copy.copy(module)
    assert copied.__dict__[PLACE] is module.__dict__[PLACE]
    assert (copied(1), module(1)) == (2, "latest")


def unchanged(*_: Any) -> None:
    """Return None: a hook that changes nothing."""


HOOKS: list[Callable[[Any], Any]] = [
    lambda module: module.register_forward_hook(unchanged),
    lambda module: module.register_forward_pre_hook(unchanged),
    lambda module: module.register_full_backward_hook(unchanged),
    lambda module: module.register_full_backward_pre_hook(unchanged),
    lambda _: torch_module.register_module_forward_hook(unchanged),
    lambda _: torch_module.register_module_forward_pre_hook(unchanged),
    lambda _: torch_module.register_module_full_backward_hook(unchanged),
    lambda _: torch_module.register_module_full_backward_pre_hook(unchanged),
]


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_run(register: Callable[[Any], Any]):
    module = module_of()
    handle = register(module)
    try:
        assert torch.equal(module(X), X + 1)
    finally:
        handle.remove()
    assert module(X) == "latest"


def test_replaced_global_hooks_run(monkeypatch: pytest.MonkeyPatch):
    module, seen = module_of(), []
    hooks = {0: lambda *_: seen.append("hook")}
    monkeypatch.setattr(torch_module, "_global_forward_hooks", hooks)
    assert module(1) == 2
    assert seen == ["hook"]


class AlwaysTrue(dict[Any, Any]):
    def __bool__(self) -> bool:
        return True


def test_unusual_hook_containers_are_left_to_pytorch():
    module = module_of()
    module._forward_hooks = AlwaysTrue()
    assert module(1) == 2


def test_previously_replaced_call_is_kept():
    """In a separate process, since this one has already read PyTorch's."""
    script = """
import torch
from torch import nn
calls, usual = [], nn.Module._call_impl
nn.Module._call_impl = lambda self, *args: (calls.append(self), usual(self, *args))[1]
from tests.runtime.test_shortcut import Latest, module_of
assert module_of(latest=Latest())(1) == 2
assert len(calls) == 1
"""
    run_python(script)


class Overriding(Slow):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 10


class Intercepting(Slow):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return "intercepted"


class Redirecting(Slow):
    def __getattribute__(self, name: str) -> Any:
        return (lambda x: x * 10) if name == "forward" else super().__getattribute__(name)


class Inheriting(Slow):
    """Inherits everything from its base."""


@pytest.mark.parametrize(
    ("cls", "result"),
    [
        (Overriding, 20),
        (Intercepting, "intercepted"),
        (Redirecting, 10),
        (Inheriting, "latest"),
    ],
)
def test_subclasses(cls: type[nn.Module], result: Any):
    assert module_of(cls)(1) == result


def test_another_forward_of_the_instance():
    module = module_of()
    module.forward = lambda x: x * 10
    assert module(1) == 10
    del module.forward
    assert module(1) == "latest"


def test_another_forward_of_the_class(monkeypatch: pytest.MonkeyPatch):
    module = module_of()
    monkeypatch.setattr(Slow, "forward", lambda self, x: x * 10)
    assert module(1) == 10


def test_replaced_call_method_wins():
    module = module_of()
    module._call_impl = lambda x: x * 10
    assert module(1) == 10


def test_compiled_call_impl_takes_precedence_until_deleted():
    module = module_of()
    module.compile(backend="eager", fullgraph=True)
    assert torch.equal(module(X), X + 1)
    assert "_compiled_call_impl" not in copy.copy(module).__dict__  # torch leaves it out
    del module._compiled_call_impl
    assert module(X) == "latest"
    module._compiled_call_impl = None
    assert torch.equal(module(X), X + 1)


def test_deleting_unset_attribute_raises():
    with pytest.raises(AttributeError, match="_compiled_call_impl"):
        del module_of()._compiled_call_impl


def test_traces_see_the_operators():
    traced = torch.jit.trace(module_of(), (X,))
    assert torch.equal(traced(X * 2), X * 2 + 1)


class Exporting(Slow):
    @torch.jit.export
    def other(self, x: Tensor) -> Tensor:
        return x * 10


def test_traces_with_exported_methods_can_be_called():
    traced: Any = torch.jit.trace(module_of(Exporting), (X,))
    assert torch.equal(traced(X * 2), X * 2 + 1)
    assert torch.equal(traced.other(X), X * 10)


def test_fx_sees_the_operators():
    graph = torch.fx.symbolic_trace(module_of(latest=Latest(NotImplemented)))
    assert torch.equal(graph(X * 2), X * 2 + 1)


class Calling(Slow):
    """Has PyTorch's compilers read ``nn.Module.__call__`` itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 10


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


@pytest.mark.parametrize("cls", [Slow, Calling])
@pytest.mark.parametrize("wrap", [lambda m: m, Parent, lambda m: m.__call__, lambda m: m.forward])
def test_torch_compile_sees_the_operators(cls: type[nn.Module], wrap: Callable[[Any], Any]):
    torch.compiler.reset()
    called = wrap(module_of(cls))
    compiled = torch.compile(called, backend="eager", fullgraph=True)
    module_result = (X + 1) * (10 if cls is Calling and "forward" not in repr(called)[:40] else 1)
    assert torch.equal(compiled(X), module_result)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("cls", [Slow, Calling])
def test_export_sees_the_operators(cls: type[nn.Module], strict: bool):
    program = torch.export.export(Parent(module_of(cls)), (X,), strict=strict)
    expected = (X * 2 + 1) * (10 if cls is Calling else 1)
    assert torch.equal(program.module()(X * 2), expected)


def test_while_torch_compile_looks_at_frames():
    module, ways = module_of(latest=Latest(torch.zeros(3))), []

    def function(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        ways.append(module(x))
        return x + 1

    torch.compile(function, backend="eager")(X)
    assert torch.equal(ways[0], X + 1)


def test_scripts_are_of_the_module_without_it():
    script: Any = torch.jit.script(tvmify(nn.Sequential(nn.Linear(3, 3)).eval()))
    assert "_compiled_call_impl" not in script.code
    assert script(X).shape == (3,)


def test_a_class_gives_the_property_itself():
    assert Slow._compiled_call_impl is vars(Slow)["_compiled_call_impl"]


def test_pickled_by_value_it_leads_the_same_way():
    """As cloudpickle pickles classes of ``__main__``."""
    unpickled = pickle.loads(pickle.dumps(vars(Slow)["_compiled_call_impl"]))

    class Again(nn.Module):
        forward = Slow.forward
        _compiled_call_impl = unpickled

    assert module_of(Again)(1) == "latest"


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="must be str, not int"):
        Shortcut(unchanged, 3, unchanged)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="place"):
        Shortcut(unchanged)  # type: ignore[call-arg]


def test_shortcut_requires_fget():
    with pytest.raises(TypeError, match="fget"):
        Shortcut.__new__(Shortcut)  # type: ignore[call-arg]


def test_classes_are_rejected():
    with pytest.raises(TypeError, match="a class has no dispatcher"):
        vars(Slow)["_compiled_call_impl"].__set__(int, 1)


def test_modules_and_classes_are_freed():
    class Local(nn.Module):
        def forward(self, x: Any) -> Any:
            return self, x

        _compiled_call_impl = shortcut(PLACE, forward)

    module: Any = module_of(Local)
    assert [module(1) for _ in range(10)] == ["latest"] * 10
    alive, alive_class = weakref.ref(module), weakref.ref(Local)
    del module
    assert alive() is None  # without a garbage collection
    del Local
    gc.collect()
    assert alive_class() is None


def test_calls_leave_no_references_behind():
    latest = Latest("result")
    module, argument = module_of(latest=latest), object()
    before = sys.getrefcount(argument), sys.getrefcount(module), sys.getrefcount(Slow.forward)
    for _ in range(100):
        module(argument)
    latest.calls.clear()
    assert before == (
        sys.getrefcount(argument),
        sys.getrefcount(module),
        sys.getrefcount(Slow.forward),
    )
