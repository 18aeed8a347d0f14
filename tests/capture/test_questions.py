"""Code that asks about its surroundings gets the same answers as in eager PyTorch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.compiler import is_compiling

from tvmify import tvmify
from tvmify.capture.questions import asks_for_layout, names_in, question_of, reached
from tvmify.errors import TvmifyWarning

scripting = torch.jit.is_scripting


def scaled(x: torch.Tensor) -> torch.Tensor:
    if not torch.jit.is_scripting():
        x = x * 2
    return x


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))


class Scripting(Asking):
    def forward(self, x):
        return scaled(x) + self.w


class ScriptingByAnotherName(Asking):
    def forward(self, x):
        if scripting():
            x = x * 2
        return x + self.w


class Compiling(Asking):
    def forward(self, x):
        compiling = is_compiling() or torch.compiler.is_exporting()
        x = [x * 3, x * 2][compiling]
        return x + self.w


class GradMode(Asking):
    def forward(self, x):
        if torch.is_grad_enabled():
            x = x * 2
        return x + self.w


missing: Any = None


class TracedWithPlaceholder(Asking):
    def forward(self, x, *others):
        if not isinstance(x, torch.Tensor):
            x = missing.asarray(x)
        return x + self.w


class ScriptedWithPlaceholder(Asking):
    def forward(self, x):
        if isinstance(x, list):
            x = [missing.asarray(item) for item in x]
        return x + self.w


class InferenceMode(Asking):
    def forward(self, x):
        return x * 2 + self.w if torch.is_inference_mode_enabled() else x * 3 + self.w


class InferenceTensor(Asking):
    def forward(self, x):
        return x * 2 + self.w if x.is_inference() else x * 3 + self.w


class NeedsGradient(Asking):
    def forward(self, x):
        y = x * self.w
        if y.requires_grad:
            y = y * 2
        if x.requires_grad:
            y = y * 3
        if self.w.requires_grad:
            y = y * 5
        return y


class Leaf(Asking):
    def forward(self, x):
        y = x * self.w
        return y * 2 if y.is_leaf else y * 3


class Node(Asking):
    def forward(self, x):
        y = x * self.w
        return y * 2 if y.grad_fn is None else y * 3


class Gradient(Asking):
    def forward(self, x):
        return x * 2 + self.w if self.w.grad is None else x * 3 + self.w


class Contiguous(Asking):
    def forward(self, x):
        return x * 2 + self.w if x.is_contiguous() else x * 3 + self.w


class Strides(Asking):
    def forward(self, x):
        return x * x.stride(0) + self.w


class Offset(Asking):
    def forward(self, x):
        return x * x.storage_offset() + self.w


class View(Asking):
    def forward(self, x):
        return x * 2 + self.w if x._base is None else x * 3 + self.w * x._is_view()


class Threads(Asking):
    def forward(self, x):
        return x * torch.get_num_threads() + self.w


class Version(Asking):
    def forward(self, x):
        return x * x._version + self.w


class VersionByAnotherName(Asking):
    def forward(self, x):
        return x * getattr(x, "_ver" + "sion") + self.w


class CaughtVersion(Asking):
    def forward(self, x):
        try:
            return x * x._version + self.w
        except Exception:
            return x * 2 + self.w


class Memory(Asking):
    def forward(self, x):
        return x * 2 + self.w if x.is_shared() or x.is_pinned() else x * 3 + self.w


class Overridden(Asking):
    def forward(self, x):
        return x * 2 + self.w if torch.overrides.has_torch_function((x,)) else x * 3 + self.w


@pytest.mark.parametrize(
    "cls",
    [
        Scripting,
        ScriptingByAnotherName,
        Compiling,
        GradMode,
        InferenceMode,
        InferenceTensor,
        NeedsGradient,
        Leaf,
        Node,
        Gradient,
        Contiguous,
        Strides,
        Offset,
        View,
        Threads,
        Version,
        VersionByAnotherName,
        CaughtVersion,
        Memory,
        Overridden,
    ],
)
def test_answers_match_eager(cls: type[Asking]) -> None:
    torch._dynamo  # noqa: B018 its import looks at the functions that are answered
    net = cls().eval()
    fast = tvmify(net, cache=False, compare=False)
    x = torch.arange(16.0).reshape(4, 4)

    def check(*arguments: torch.Tensor) -> None:
        expected, got = net(*arguments), fast(*arguments)
        assert torch.equal(got, expected)
        assert got.requires_grad == expected.requires_grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about those that run in eager
        check(x)
        with torch.no_grad():
            check(x)
            check(x.t())
            check(torch.arange(32.0).reshape(8, 4)[4:])
            check(x.clone().requires_grad_())
        with torch.inference_mode():
            check(x)
            if "Version" not in cls.__name__:
                check(torch.arange(16.0).reshape(4, 4))
        x += 1
        check(x)
        net(x).sum().backward()
        check(x)
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            check(x)
        finally:
            torch.set_num_threads(threads)
        net.w.requires_grad_(False)
        check(x)


def test_a_question_that_a_call_does_not_ask_does_not_lead_to_eager() -> None:
    class Cached(nn.Module):
        """Asks about a tensor in one of its branches."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.is_cached = False

        def forward(self, x):
            return x * x._version if self.is_cached else self.linear(x)

    net = Cached().eval()
    fast = tvmify(net, cache=False, compare=False)
    x = torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x))
        assert [signature.runs for signature in fast.explain().signatures] == ["compiled"]
        net.is_cached = fast.is_cached = True
        x += 1
        assert torch.equal(fast(x), net(x))
        assert any("_version" in signature.reason for signature in fast.explain().signatures)


class AssignsData(Asking):
    def forward(self, x):
        self.w.data = self.w.data * 2
        return x + self.w


class AssignsDataOfAnArgument(Asking):
    def forward(self, x, **_):  # TorchScript refuses star arguments
        x.data = x * 2
        return x + self.w


class AssignsDataOfAValue(Asking):
    def forward(self, x):
        y = x + 1
        z = y.view(-1)
        y.data = x * 2
        return y + self.w, z * 2


class SetsAttributeOfResult(Asking):
    def forward(self, x):
        y = x + self.w
        y.scale = 3
        return y


class SetsAttributeOfArgument(Asking):
    def forward(self, x):
        x.scale = 3
        return x + self.w


class RequiresGradientOfArgument(Asking):
    def forward(self, x, **_):
        x.requires_grad_()
        return x + self.w


class RequiresGradientOfResult(Asking):
    def forward(self, x):
        y = (x + self.w).detach()
        return y.requires_grad_()


class NewParameter(Asking):
    def forward(self, x):
        return nn.Parameter(x + self.w)


class DefaultType(Asking):
    def forward(self, x):
        torch.set_default_dtype(torch.float64)
        y = x + torch.ones(4)
        torch.set_default_dtype(torch.float32)
        return y + self.w


class WritesToList(Asking):
    def forward(self, x):
        torch._foreach_mul_([self.w, x], 2.0)
        return x + self.w


class WritesToListOfViews(Asking):
    def forward(self, x, **_):
        y = x + self.w
        torch._foreach_mul_([y, y.view(-1)], 2.0)
        return y * 1


class WritesToListWithLiteral(Asking):
    def forward(self, x, **_):
        t = torch.tensor([1.0, 2.0])
        torch._foreach_add_([t.view(2)], [x.flatten()[:2]])
        return x * t.sum().item() + self.w


@pytest.mark.parametrize(
    "cls",
    [
        AssignsData,
        AssignsDataOfAnArgument,
        AssignsDataOfAValue,
        SetsAttributeOfResult,
        SetsAttributeOfArgument,
        RequiresGradientOfArgument,
        RequiresGradientOfResult,
        NewParameter,
        DefaultType,
        WritesToList,
        WritesToListOfViews,
        WritesToListWithLiteral,
    ],
)
@torch.no_grad()
def test_effects_that_recordings_lack_are_there(cls: type[Asking]) -> None:
    plain, net = cls().eval(), tvmify(cls().eval(), compare=False, cache=False)
    expected = "forward (assigns|sets|calls|returns)|aten._foreach_"
    with pytest.warns(TvmifyWarning, match=expected):
        for start in (0.0, 5.0):
            x, again = (torch.arange(start, start + 4) for _ in range(2))
            y, right = net(x), plain(again)
            torch.testing.assert_close((y, x, net.w), (right, again, plain.w))
            assert type(y) is type(right)
            if isinstance(y, torch.Tensor):
                assert vars(y) == vars(right)
                assert y.requires_grad == right.requires_grad
            assert (x.requires_grad, vars(x)) == (again.requires_grad, vars(again))


def test_attributes_of_arguments_are_read() -> None:
    class Scaled(Asking):
        def forward(self, x):
            return x * getattr(x, "scale", 1.0) + self.w

    net = tvmify(Scaled().eval(), compare=False, cache=False)
    x = torch.ones(4)
    x.scale = 3.0  # type: ignore[attr-defined]
    with torch.no_grad(), pytest.warns(TvmifyWarning, match="asks for scale"):
        assert torch.equal(net(x), x * 3 + 1)


class Placeholder:
    """Stands for a package that is not installed."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"not installed: {name}")


class SlottedPlaceholder(Placeholder):
    __slots__ = ()


class Unbound:
    """Stands for an object that does not exist yet."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"not bound: {name}")


@pytest.mark.parametrize("placeholder", [Placeholder, SlottedPlaceholder, Unbound])
@pytest.mark.parametrize("kind", [TracedWithPlaceholder, ScriptedWithPlaceholder])
def test_placeholders_whose_attributes_fail(
    placeholder: type, kind: type[Asking], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "missing", placeholder())
    net = tvmify(kind().eval(), compare=False, cache=False, strict=True)
    with torch.no_grad():
        assert torch.equal(net(torch.ones(4)), torch.full((4,), 2.0))


def test_items_of_dicts_are_updated_in_place() -> None:
    class Updating(Asking):
        def forward(self, x):
            parts = {"a": x + self.w}
            parts["b"] = parts["a"]
            parts["a"] *= 2
            return parts

    x = torch.ones(4)
    with torch.no_grad():
        parts = tvmify(Updating().eval(), compare=False, cache=False)(x)
    assert parts["a"] is parts["b"] and torch.equal(parts["b"], x * 4)


def test_grad_mode_is_ignored_unless_queried() -> None:
    class Recorded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, *rest):  # TorchScript refuses star arguments
            with torch.no_grad():
                y = self.linear(x)
            return y + self.linear(x).detach()

    fast = tvmify(Recorded().eval(), cache=False, compare=False)
    x = torch.randn(2, 4)
    fast(x)
    with torch.no_grad():
        fast(x)
    with torch.inference_mode():
        fast(x)
    assert fast.cache_info().builds == 1
    assert fast.cache_info().misses == 3


def test_torchs_own_layers_are_trusted_and_methods_are_distinguished_from_attributes() -> None:
    layers = nn.Sequential(nn.Upsample(scale_factor=2), nn.Linear(4, 4))
    assert question_of(reached(layers)) is None
    assert question_of(reached(Scripting())) == "is_scripting"
    assert "is_scripting" in names_in(scaled)
    assert asks_for_layout(Strides())

    class Pool(nn.Module):
        stride = 2

        def forward(self, x):
            return nn.functional.max_pool1d(x, 2, stride=self.stride)

    assert not asks_for_layout(Pool())
