from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tests.tolerances import assert_close_to_reference
from tvmify import OptionError, TvmifyWarning
from tvmify import tvmify as decorate
from tvmify.decorate.methods import undecorated


class Plain(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add one to a linear map."""
        return torch.relu(self.linear(x)) + 1


@decorate
class Bare(Plain):
    pass


@decorate(target="llvm")
class WithOptions(nn.Module):
    """Has a docstring."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """Scale a linear map."""
        return self.linear(x) * scale


class Heir(WithOptions):
    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return super().forward(x, scale) + 1


@decorate
class DecoratedHeir(Heir):
    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return self.linear(x) - scale


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Bare().eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def builds(subject: Any) -> int:
    return tvmify.cache_info(subject).builds


def test_every_spelling_of_the_decorator() -> None:
    assert callable(tvmify)
    for spelling in (decorate, tvmify.tvmify, tvmify):
        for decorator in (spelling, spelling(), spelling(target="llvm")):
            subclass = type("Subclass", (Plain,), {})
            assert decorator(subclass) is subclass
            assert hasattr(subclass, "cache_info")


def test_the_class_stays_the_class() -> None:
    net = WithOptions().eval()
    assert type(net) is WithOptions
    assert isinstance(net, nn.Module)
    assert WithOptions.__doc__ == "Has a docstring."
    assert WithOptions.forward.__doc__ == "Scale a linear map."
    assert list(inspect.signature(net.forward).parameters) == ["x", "scale"]
    assert list(inspect.signature(WithOptions).parameters) == ["width"]
    assert sorted(net.state_dict()) == ["linear.bias", "linear.weight"]


def test_a_call_runs_compiled_and_compiles_once() -> None:
    net = WithOptions().eval()
    with torch.no_grad():
        first, second = net(X), net(X)
    assert torch.equal(first, second)
    assert torch.allclose(first, net.linear(X) * 2, atol=1e-6)
    info = net.cache_info()
    assert (info.hits, info.misses, info.builds, info.entries) == (1, 1, 1, 1)


def test_keyword_arguments_and_defaults() -> None:
    net = WithOptions().eval()
    with torch.no_grad():
        expected = net.linear(X) * 3
        assert torch.allclose(net(X, 3.0), expected, atol=1e-6)
        assert torch.allclose(net(X, scale=3.0), expected, atol=1e-6)
        assert torch.allclose(net(scale=3.0, x=X), expected, atol=1e-6)
        assert not torch.allclose(net(X), expected, atol=1e-6)
    assert net.cache_info().entries == 4


def test_load_state_dict_and_to_take_effect(inference: None) -> None:
    net, other = Bare().eval(), Bare().eval()
    net(X)
    net.load_state_dict(other.state_dict())
    assert torch.equal(net(X), other(X))
    assert builds(net) == 1
    net.to(torch.float64)
    assert net(X.double()).dtype == torch.float64


def test_hooks_of_the_module_run(inference: None) -> None:
    net = Bare().eval()
    seen: list[torch.Size] = []
    net.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    net.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    result = net(X)
    assert seen == [torch.Size([3, 8])]
    assert torch.equal(result[0], result[1])
    assert builds(net) == 1


def test_deepcopy_is_independent(inference: None) -> None:
    net = Bare().eval()
    before = net(X)
    twin = copy.deepcopy(net)
    twin.linear.weight.zero_()
    assert not torch.equal(twin(X), before)
    assert torch.equal(net(X), before)
    assert twin.cache_info().builds == 0  # the same program: shared with the first


def test_shallow_copy_has_separate_attributes(inference: None) -> None:
    net = Bare().eval()
    before = net(X)
    twin = copy.copy(net)
    twin._modules = {"linear": nn.Linear(4, 8)}
    assert not torch.equal(twin(X), before)
    assert torch.equal(net(X), before)


@pytest.mark.parametrize("make", [Bare, lambda: decorate(Plain(), strict=True)])
def test_pickle_and_torch_save(make: Callable[[], nn.Module], inference: None) -> None:
    net = make().eval()
    before = net(X)
    again = pickle.loads(pickle.dumps(net))
    assert torch.equal(again(X), before)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(X), before)
    assert tvmify.cache_info(loaded).entries == 1


def test_subclass_calls_the_compiled_forward_of_its_base(inference: None) -> None:
    net = Heir().eval()
    assert torch.allclose(net(X), net.linear(X) * 2 + 1, atol=1e-6)
    assert builds(net) == 1


def test_decorated_subclass_of_a_decorated_class(inference: None) -> None:
    net = DecoratedHeir().eval()
    assert torch.allclose(net(X), net.linear(X) - 2, atol=1e-6)
    assert builds(net) == 1


def test_a_decorated_submodule_is_compiled_into_its_parent(inference: None) -> None:
    net = decorate(Holder().eval())
    assert torch.allclose(net(X), (torch.relu(net.inner.linear(X)) + 1) * 2, atol=1e-6)
    assert builds(net) == 1
    assert type(net.inner) is Bare
    assert builds(net.inner) == 0


def test_an_instance_leaves_the_original_eager_and_shares_its_weights(inference: None) -> None:
    plain = Plain().eval()
    fast = decorate(plain)
    assert isinstance(fast, Plain)
    assert type(plain) is Plain
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert_close_to_reference(fast(X), plain, (X,))
    plain.linear.weight.mul_(3)
    assert_close_to_reference(fast(X), plain, (X,))
    plain.linear = nn.Linear(4, 8)
    assert fast.linear is plain.linear
    assert_close_to_reference(fast(X), plain, (X,))
    assert builds(fast) == 1
    assert not hasattr(plain, "cache_info")


def test_an_instance_can_be_decorated_again_with_other_options() -> None:
    once = decorate(Plain())
    twice = decorate(once, strict=True)
    assert isinstance(twice, Plain)
    assert not isinstance(twice, type(once))
    with pytest.raises(tvmify.TrainingMode), torch.no_grad():
        twice(X)


def test_alike_decorated_instances_share_a_class() -> None:
    first, other = decorate(nn.Linear(4, 4)), decorate(nn.Linear(4, 8))
    assert type(first) is type(other) is type(copy.deepcopy(first)) is not nn.Linear
    assert type(decorate(nn.Linear(4, 4), strict=True)) is not type(first)
    target = {"kind": "llvm"}  # a dict cannot be a key
    restricted = decorate(nn.Linear(4, 4), target=target)
    assert type(restricted) is type(copy.deepcopy(restricted)) is not type(first)


def test_deepcopy_of_a_decorated_instance(inference: None) -> None:
    fast = decorate(Plain().eval())
    twin = copy.deepcopy(fast)
    assert isinstance(twin, Plain)
    assert torch.equal(twin(X), fast(X))
    assert twin.linear is not fast.linear


def test_copy_drops_the_state_of_module_compile(inference: None) -> None:
    fast = decorate(Plain().eval())
    fast.compile(backend="eager")
    twin = copy.deepcopy(fast)
    with torch.no_grad():
        twin.linear.bias.add_(1)
    assert torch.equal(fast(X), Plain.forward(fast, X))
    assert torch.allclose(twin(X), Plain.forward(twin, X))


def test_torch_compiled_module_runs_our_code(inference: None) -> None:
    plain = Plain().eval()
    plain.compile(backend="eager")
    fast = decorate(plain)
    assert torch.allclose(fast(X), plain(X))
    assert builds(fast) == 1


def test_a_function() -> None:
    @decorate(strict=True)
    def gelu_twice(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """Twice."""
        result = torch.nn.functional.gelu(x) * 2
        return result if y is None else result + y

    assert gelu_twice.__doc__ == "Twice."
    assert torch.allclose(gelu_twice(X), torch.nn.functional.gelu(X) * 2, atol=1e-5)
    assert torch.allclose(gelu_twice(X, X), torch.nn.functional.gelu(X) * 2 + X, atol=1e-5)
    assert gelu_twice.cache_info().builds == 2


def test_a_lambda_and_a_scripted_function(inference: None) -> None:
    fast = decorate(lambda x: x * 2 + 1, strict=True)
    assert torch.equal(fast(X), X * 2 + 1)

    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    with pytest.warns((DeprecationWarning, FutureWarning)):
        scripted = torch.jit.script(double)
    assert torch.equal(decorate(scripted, strict=True)(X), X + X)


class Adding:
    def __init__(self, other: torch.Tensor) -> None:
        self.other = other

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.other


@pytest.mark.parametrize("called", [Adding(X * 3), functools.partial(torch.add, X)])
def test_a_callable_object(called: Any, inference: None) -> None:
    fast: Any = decorate(called, strict=True)
    assert torch.equal(fast(X), called(X))
    assert fast.cache_info().builds == 1


def test_decorating_a_single_method_is_refused() -> None:
    # a TypeError, in which Python 3.11 wraps what __set_name__ raises
    with pytest.raises((RuntimeError, TypeError)) as caught:

        class Net(nn.Module):
            @decorate
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

    error = caught.value.__cause__ or caught.value
    assert "with @tvmify(methods=['forward'])" in str(error)

    class WithFunction(nn.Module):
        act: Any = decorate(nn.functional.gelu)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x)

    assert WithFunction()(X).shape == X.shape


def scripted_plain() -> torch.jit.ScriptModule:
    with pytest.warns((DeprecationWarning, FutureWarning)):
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(Plain().eval()), file)
        file.seek(0)
        return torch.jit.load(file)


def test_a_torchscript_module(inference: None) -> None:
    script = scripted_plain()
    fast = decorate(script, strict=True)
    assert list(fast.state_dict()) == list(script.state_dict())
    assert torch.allclose(fast(X), script(X), atol=1e-6)
    fast.load_state_dict(Plain().state_dict())
    assert torch.allclose(fast(X), script(X), atol=1e-6)
    fast.linear.weight.zero_()
    assert torch.allclose(fast(X), script(X), atol=1e-6)
    assert builds(fast) == 1
    fast.double()
    assert torch.allclose(fast(X.double()), script(X.double()), atol=1e-9)
    twin = copy.deepcopy(fast)
    twin.linear.weight.add_(1)
    assert not torch.equal(twin(X.double()), fast(X.double()))
    with pytest.raises(tvmify.TrainingMode):
        fast.train()(X.double())


def test_names_of_the_user_are_kept() -> None:
    @decorate
    class Own(nn.Module):
        def explain(self) -> str:
            return "mine"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    net = Own().eval()
    assert net.explain() == "mine"
    assert "Own" in str(tvmify.explain(net))


@pytest.mark.parametrize("subject", [3, int, "llvm", torch.jit.ScriptModule])
def test_undecoratable_object_is_named(subject: object) -> None:
    with pytest.raises((TypeError, OptionError)):
        decorate(subject)


def test_wrong_options_are_found_at_decoration() -> None:
    with pytest.raises(ValueError, match="'llvm', 'cuda'"):
        decorate(target="opencl")
    with pytest.raises(ValueError, match="unknown option 'speed'"):
        decorate(speed=11)


def test_functions_for_decorated_objects_refuse_others() -> None:
    with pytest.raises(TypeError, match="Plain is not decorated"):
        tvmify.cache_info(Plain())


def test_scripting_does_not_mix_up_decorated_parts(inference: None) -> None:
    """While scripting, torch.jit identifies modules by address, also deleted ones."""
    for count in range(2, 12):
        net = nn.Sequential(*(Bare(4) for _ in range(count))).eval()
        expected = functools.reduce(lambda x, part: torch.relu(part.linear(x)) + 1, net, X)
        parts = [weakref.ref(part) for part in net]
        with pytest.warns((DeprecationWarning, FutureWarning)):
            torch.testing.assert_close(torch.jit.script(net)(X), expected)
        assert all(part() is not None for part in parts)
    plain: Any = undecorated(nn.Sequential(Bare(4), Bare(4)))
    assert all(part.__prepare_scriptable__() is part for part in plain)


def test_torch_script_export_and_compile_see_the_original(inference: None) -> None:
    net = Bare().eval()
    expected = torch.relu(net.linear(X)) + 1
    with pytest.warns((DeprecationWarning, FutureWarning)):
        assert torch.equal(torch.jit.script(net)(X), expected)
        assert torch.equal(torch.jit.trace(net, X, check_trace=False)(X), expected)
    assert torch.equal(torch.export.export(net, (X,)).module()(X), expected)
    assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(X), expected)
    assert torch.equal(torch.fx.symbolic_trace(net)(X), expected)
    assert builds(net) == 0
    assert type(net) is Bare


def test_vmap_and_grad_transforms_run_eager() -> None:
    net = Bare().eval()
    result = torch.func.vmap(net)(X)
    assert torch.allclose(result, torch.relu(net.linear(X)) + 1, atol=1e-6)
    weights = dict(net.named_parameters())
    gradient = torch.func.grad(lambda w: torch.func.functional_call(net, w, (X,)).sum())(weights)
    assert gradient["linear.weight"].abs().sum() > 0
    assert net.cache_info().eager == 2 and "is traced or transformed" in str(net.explain())


def test_disabled_by_environment(monkeypatch: pytest.MonkeyPatch, inference: None) -> None:
    monkeypatch.setenv("TVMIFY_DISABLE", "1")
    net = Bare().eval()
    assert torch.equal(net(X), torch.relu(net.linear(X)) + 1)
    assert net.cache_info().builds == 0
    assert "TVMIFY_DISABLE is set" in str(net.explain())


def test_mismatched_target_runs_eager_with_a_warning(inference: None) -> None:
    fast = decorate(Plain().eval(), target="cuda")
    with pytest.warns(TvmifyWarning, match="inputs are on 'cpu', but the target is 'cuda'"):
        assert torch.equal(fast(X), Plain.forward(fast, X))
    fast(X)
    assert "inputs are on 'cpu'" in str(tvmify.explain(fast))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_module_with_an_overloaded_forward(kind: type[nn.Module]) -> None:
    # TorchScript compiles it to forward__0 and forward__1, without a forward
    module = kind(4, 8).eval()
    fast = decorate(module, strict=True)
    x = torch.randn(5, 2, 4)
    with torch.no_grad():
        torch.testing.assert_close(fast(x)[0], module(x)[0])
