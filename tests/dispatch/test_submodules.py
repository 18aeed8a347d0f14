"""A forward that only Python can run: the modules that it calls are compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close

from tvmify import NotCompiled, TvmifyWarning, explain, save
from tvmify import tvmify as decorate
from tvmify.dispatch import undescribed
from tvmify.errors import SaveError


@dataclass
class Batch:
    x: Tensor
    mask: Tensor | None = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU())
        self.head = nn.Linear(8, 2)

    def forward(self, batch: Any) -> Any:
        x, mask = (batch.x, batch.mask) if isinstance(batch, Batch) else (batch, None)
        h = self.body(x)
        return self.head(h if mask is None else h * mask)


class ReturnsObjects(Net):
    def forward(self, batch: Any) -> Any:
        @dataclass
        class Result:  # a class local to this call
            logits: Tensor

        return Result(super().forward(batch))


class AsksForVersion(Net):
    def forward(self, batch: Any) -> Any:
        return super().forward(batch) + batch._version


def batches(rows: int, *, masked: bool = False) -> Batch:
    return Batch(torch.randn(rows, 4), torch.rand(rows, 1) if masked else None)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_calls_with_objects_compile_submodules(recwarn: pytest.WarningsRecorder) -> None:
    fast = decorate(Net().eval(), cache=False, dynamic=False)
    plain = Net().eval()
    plain.load_state_dict(fast.state_dict())
    with torch.no_grad():
        for batch in (batches(3), batches(3, masked=True), batches(3)):
            assert_close(fast(batch), plain(batch))
        assert (fast.cache_info().builds, fast.cache_info().eager) == (2, 0)
        text = str(explain(fast))
        assert "the modules that it calls are compiled separately" in text
        assert "argument [0] is a" in text and "runs in eager" not in text
        # A call with a tensor is still one program.
        x = torch.randn(3, 4)
        assert_close(fast(x), plain(x))
        assert fast.cache_info().builds == 3
        # Weights and submodules may change.
        for net in (fast, plain):
            net.head.weight.mul_(2)  # type: ignore[operator]
        assert_close(fast(batch), plain(batch))
        fast.head = plain.head = nn.Linear(8, 3).eval()
        assert_close(fast(batch), plain(batch))
    assert not [str(w.message) for w in recwarn if issubclass(w.category, TvmifyWarning)]


@pytest.mark.usefixtures("inference")
def test_class_of_an_object_is_examined_once(count_calls: Callable[..., list[Any]]) -> None:
    examined = count_calls(undescribed, "_why")
    net = Net().eval()
    fast: Any = decorate(net, compare=False)
    for rows in (2, 2, 3):
        batch = batches(rows, masked=rows == 3)
        assert_close(fast(batch), net(batch))
    assert len(examined) == 1
    assert_close(fast(batch=batch), net(batch))
    x = torch.randn(5, 2, 4)
    vmapped = torch.func.vmap(lambda x: fast(Batch(x)))(x)
    assert_close(vmapped, net(x))
    assert len(examined) == 2  # transforms are checked each time


def test_calls_with_objects_have_eager_gradients() -> None:
    fast = decorate(Net().eval(), cache=False)
    batch = batches(3)
    with pytest.warns(TvmifyWarning, match="weights require gradients"):
        fast(batch).sum().backward()
    ours = [parameter.grad for parameter in fast.parameters()]
    fast.zero_grad(set_to_none=True)
    Net.forward(fast, batch).sum().backward()
    for grad, parameter in zip(ours, fast.parameters(), strict=True):
        assert_close(grad, parameter.grad)
    with pytest.warns(TvmifyWarning, match="training mode"):
        fast.train()(batch)


def test_calls_with_objects_raise_as_in_eager() -> None:
    fast = decorate(Net().eval(), cache=False)
    bad = Batch(torch.randn(3, 5))
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fast(bad)


def test_objects_are_refused_where_python_must_not_run(tmp_path: Any) -> None:
    with torch.no_grad():
        with pytest.raises(NotCompiled, match=r"argument \[0\] is a .*Batch"):
            decorate(Net().eval(), cache=False, strict=True)(batches(3))
        fast = decorate(Net().eval(), cache=False)
        fast(batches(3))
        with pytest.raises(SaveError):
            save(fast, tmp_path / "net.pt")


@pytest.mark.parametrize(
    ("cls", "result"),
    [(ReturnsObjects, lambda result: result.logits), (AsksForVersion, lambda result: result)],
)
def test_forward_runs_in_python_if_it_must(cls: type[Net], result: Callable[[Any], Tensor]) -> None:
    fast = decorate(cls().eval(), cache=False, dynamic=False)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(3, 4).add_(1)
            assert_close(result(fast(x)), result(cls.forward(fast, x)))
    assert fast.cache_info().builds == 2
    assert "compiled separately" in str(explain(fast))
    with torch.no_grad(), pytest.raises(NotCompiled):
        decorate(cls().eval(), cache=False, strict=True)(x)


class Updates(Net):
    """Puts its result into the dict argument, as sentence-transformers do."""

    def forward(self, batch: Any) -> Any:
        batch["logits"] = super().forward(batch["x"])
        return batch


def test_modules_of_a_forward_that_changes_its_arguments_are_compiled() -> None:
    net = Updates().eval()
    fast: Any = decorate(net, cache=False)
    with torch.no_grad():
        for rows in (3, 4, 3):
            batch = {"x": torch.randn(rows, 4)}
            assert fast(batch) is batch
            assert_close(batch["logits"], Net.forward(net, batch["x"]))
    assert fast.cache_info().eager == 0
    (method,) = fast.explain().methods
    assert {part.name for part in method.parts} == {"Updates.body", "Updates.head"}


class PassesFunctions(Net):
    def forward(self, batch: Any) -> Any:
        q = super().forward(batch)[None, None]
        return flex_attention(q, q + 1, q * 2, score_mod=lambda score, *_: score * 2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_modules_around_an_operator_that_takes_functions_are_compiled() -> None:
    net = PassesFunctions().eval()
    fast: Any = decorate(net, cache=False)
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert_close(fast(x), net(x))
    assert fast.cache_info().eager == 0
    (method,) = fast.explain().methods
    assert {part.name for part in method.parts} == {"PassesFunctions.body", "PassesFunctions.head"}


class Packs(nn.Module):
    """Packs sequences by their lengths, which ``torch.export`` cannot record."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU())

    def forward(self, x: Tensor, lengths: Tensor, *rest: Tensor) -> Tensor:
        if x.dim() == 3:
            x = pad_packed_sequence(pack_padded_sequence(x, lengths, True), True)[0]
        return self.body(x)


def test_modules_around_unrecordable_code_are_compiled() -> None:
    net = Packs().eval()
    fast: Any = decorate(net, cache=False)
    x, lengths = torch.randn(2, 5, 4), torch.tensor([5, 3])
    with torch.no_grad():
        assert_close(fast(x, lengths), net(x, lengths))
        assert_close(fast(x[0], lengths), net(x[0], lengths))
        with pytest.raises(RuntimeError, match="Expected"):  # the caller's error
            fast(x, torch.tensor([9, 9, 9]))
    assert fast.cache_info().eager == 0
    (method,) = fast.explain().methods
    assert {part.name for part in method.parts} == {"Packs.body"}


class Sparse(nn.Module):
    """Has an operator that is neither compiled nor bridged for some arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(x.to_sparse().to_dense() if x.dim() == 2 else x)


def test_modules_around_an_unknown_operator_are_compiled() -> None:
    net = nn.Sequential(Sparse(), nn.Linear(4, 4)).eval()
    fast: Any = decorate(net, cache=False)
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert_close(fast(x), net(x))
        assert_close(fast(x[0]), net(x[0]))
    (method,) = fast.explain().methods
    by_parts, whole = method.signatures
    assert (by_parts.runs, whole.runs) == ("regions", "compiled")
    assert "aten._to_sparse.default" in by_parts.reason
    assert {part.name for part in method.parts} == {"Sequential.0", "Sequential.1"}
    (sparse,) = (part for part in method.parts if part.name == "Sequential.0")
    assert {part.name for part in sparse.parts} == {"Sequential.0.before", "Sequential.0.after"}
    assert fast.cache_info().eager == 0


class Autoencoder(Net):
    def encode(self, x: Tensor) -> Tensor:
        return self.body(x)


class Uses(nn.Module):
    """Calls a method of its child that is not forward, as TTS models call ``infer``."""

    def __init__(self) -> None:
        super().__init__()
        self.codec = Autoencoder()

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        h = self.codec.encode(x)
        return h if h.sum() > 0 else h * 2


def test_children_of_a_child_are_compiled_for_its_other_methods() -> None:
    net = Uses().eval()
    fast: Any = decorate(net, cache=False)
    with torch.no_grad():
        for x in (torch.randn(3, 4), torch.randn(3, 4) - 3):
            assert_close(fast(x), net(x))
    (method,) = fast.explain().methods
    assert {part.name for part in method.parts} == {"Uses.codec.body"}
