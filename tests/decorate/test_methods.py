"""``methods=``: which methods of a module run compiled."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tvmify import OptionError, SaveError, TvmifyWarning, WarmUpError
from tvmify import tvmify as decorate

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(4, 8)
        self.outward = nn.Linear(8, 4)

    def encode(self, x: torch.Tensor, scale: int = 1) -> torch.Tensor:
        """Encode."""
        return torch.tanh(self.inward(x)) * scale

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return self.outward(code)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))

    def error(self, x: torch.Tensor) -> torch.Tensor:
        return (self(x) - x).abs().sum()

    def repeated(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self.forward(x) if times > 1 else self(x)
        return x


@decorate(methods=["encode", "decode"], strict=True)
class Coder(Plain):
    pass


@decorate(strict=True)
class WholeCoder(Coder):
    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return super().decode(code) * 2


class Heir(Coder):
    def encode(self, x: torch.Tensor, scale: int = 1) -> torch.Tensor:
        return super().encode(x, scale) + 1


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


def plain_of(module: nn.Module) -> Plain:
    plain = Plain().eval()
    plain.load_state_dict(module.state_dict())
    return plain


def builds(subject: Any) -> int:
    return tvmify.cache_info(subject).builds


@pytest.fixture
def coder() -> Any:
    return Coder().eval()


def test_methods_have_separate_signatures(coder: Any, inference: None) -> None:
    plain = plain_of(coder)
    code = coder.encode(X)
    torch.testing.assert_close(code, plain.encode(X))
    torch.testing.assert_close(coder.decode(code), plain.decode(code))
    torch.testing.assert_close(coder.encode(X, scale=2), plain.encode(X, 2))
    info = coder.cache_info()
    assert (info.builds, info.entries, info.misses) == (3, 3, 3)
    assert coder.encode.__doc__ == "Encode."


def test_unnamed_method_calls_compiled_ones(coder: Any, inference: None) -> None:
    torch.testing.assert_close(coder(X), plain_of(coder)(X))
    assert coder.cache_info().entries == 2


def test_named_forward_is_one_program(inference: None) -> None:
    fast = decorate(Plain().eval(), methods=["forward", "encode"], strict=True)
    torch.testing.assert_close(fast(X), plain_of(fast)(X))
    assert builds(fast) == 1


@pytest.mark.parametrize(
    ("method", "args"), [("error", ()), ("repeated", (1,)), ("repeated", (2,))]
)
def test_method_calling_the_module(method: str, args: tuple[Any, ...], inference: None) -> None:
    fast = decorate(Plain().eval(), methods=[method, "forward"], strict=True)
    torch.testing.assert_close(
        getattr(fast, method)(X, *args), getattr(plain_of(fast), method)(X, *args)
    )
    assert builds(fast) == 1


def test_hooks_run_when_a_method_calls_the_module() -> None:
    fast: Any = decorate(Plain().eval(), methods=["error"])
    with torch.no_grad():
        fast.error(X)
        fast.register_forward_hook(lambda module, args, result: args[0])
        with pytest.warns(TvmifyWarning, match="the module has a forward hook"):
            assert fast.error(X) == 0


def test_changed_weights_reach_every_method(coder: Any, inference: None) -> None:
    coder.encode(X)
    coder.decode(torch.ones(3, 8))
    for parameter in coder.parameters():
        parameter.mul_(2)
    plain = plain_of(coder)
    torch.testing.assert_close(coder.encode(X), plain.encode(X))
    torch.testing.assert_close(coder.decode(torch.ones(3, 8)), plain.decode(torch.ones(3, 8)))
    assert builds(coder) == 2


def test_copies_and_pickles_have_the_methods(inference: None) -> None:
    for fast in (Coder().eval(), decorate(Plain().eval(), methods=["encode"])):
        expected: torch.Tensor = fast.encode(X)
        for again in (copy.deepcopy(fast), copy.copy(fast), pickle.loads(pickle.dumps(fast))):
            assert torch.equal(again.encode(X), expected)
            assert tvmify.cache_info(again).entries == 1
            assert isinstance(again, Plain)


def test_a_copy_is_independent(coder: Any, inference: None) -> None:
    before = coder.encode(X)
    twin = copy.deepcopy(coder)
    twin.inward.weight.zero_()
    assert not torch.equal(twin.encode(X), before)
    assert torch.equal(coder.encode(X), before)


def test_an_undecorated_subclass_calls_the_compiled_methods_of_its_base(inference: None) -> None:
    heir = Heir().eval()
    torch.testing.assert_close(heir.encode(X), plain_of(heir).encode(X) + 1)
    assert builds(heir) == 1


def test_decorated_subclass_compiles_its_named_methods(inference: None) -> None:
    net = WholeCoder().eval()
    torch.testing.assert_close(net(X), plain_of(net)(X) * 2)
    assert builds(net) == 1


@pytest.mark.parametrize("kind", [Coder, Heir, WholeCoder])
def test_inside_of_another_module(kind: type[Plain], inference: None) -> None:
    net = Holder(kind().eval()).eval()
    expected = net(X)
    fast = decorate(net, strict=True)
    torch.testing.assert_close(fast(X), expected)
    assert builds(fast) == 1


@pytest.mark.parametrize("signature", [[(2, 4), (3, 4)], [], {"y": (2, 4)}])
def test_warm_up_refuses_values_that_are_not_calls(signature: Any) -> None:
    for fast in (decorate(nn.Sequential(nn.Linear(4, 4)).eval()), decorate(lambda x: x + 1)):
        with pytest.raises(WarmUpError, match=r"argument.*signature of its own"):
            fast.warmup(signature)
        assert fast.cache_info().misses == 0


def test_warm_up_wants_a_method(coder: Any) -> None:
    with torch.no_grad():
        coder.warmup([(3, 4)], method="encode")
        coder.warmup([(3, 8)], method="decode")
        assert coder.cache_info().builds == 2
        coder(X)
    assert coder.cache_info().misses == 2
    for method in (None, "forward"):
        with pytest.raises(WarmUpError, match="encode, decode"):
            coder.warmup([(3, 4)], method=method)


def test_explain_and_refresh_are_about_all_methods(coder: Any, inference: None) -> None:
    coder(X)
    text = str(coder.explain())
    assert "Coder.encode: 1 built" in text and "Coder.decode: 1 built" in text
    coder.refresh()
    assert coder.cache_info().entries == 0


def test_saved_file_contains_only_forward(tmp_path: Path, coder: Any, inference: None) -> None:
    path = tmp_path / "net.pt"
    for write in (tvmify.save, tvmify.export):
        with pytest.raises(SaveError, match="forward is not decorated"):
            write(coder, path, example_inputs=X)
    fast = decorate(Plain().eval(), methods=["encode", "forward"])
    fast.encode(X)
    tvmify.save(fast, path, example_inputs=X)
    torch.testing.assert_close(tvmify.load(path)(X), plain_of(fast)(X))


def test_gradients_of_a_method() -> None:
    fast: Any = decorate(Plain().eval(), methods=["encode"], strict=True)
    fast.encode(X).sum().backward()
    plain = plain_of(fast)
    plain.encode(X).sum().backward()
    torch.testing.assert_close(fast.inward.weight.grad, plain.inward.weight.grad)


class Odd(nn.Module):
    @staticmethod
    def still(x: torch.Tensor) -> torch.Tensor:
        return x

    @property
    def size(self) -> int:
        return 1

    def parts(self) -> Any:
        yield 1


@pytest.mark.parametrize("methods", ["encode", [], ["a", "a"], [1], 3])
def test_invalid_method_lists_are_refused(methods: Any) -> None:
    with pytest.raises(OptionError, match="methods"):
        decorate(methods=methods)


@pytest.mark.parametrize("name", ["missing", "still", "size", "parts", "__call__", "training"])
def test_non_method_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        decorate(Odd(), methods=[name])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("still", "static"), ("parts", "generator"), ("__call__", "special")],
)
def test_refusal_names_the_kind_of_object(name: str, kind: str) -> None:
    with pytest.raises(OptionError, match=f"since it is a {kind}"):
        decorate(Odd(), methods=[name])


def test_functions_have_no_methods() -> None:
    with pytest.raises(OptionError, match="methods"):
        decorate(lambda x: x, methods=["forward", "encode"])
