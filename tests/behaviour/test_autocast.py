"""Calls under ``torch.autocast`` run compiled, with eager's dtypes."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import tvmify
from tests.tolerances import assert_close_to_reference
from tvmify import SaveError, TvmifyWarning
from tvmify import tvmify as decorate

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Mixed(nn.Module):
    """Operators that autocast runs in half precision, in the widest dtype, and unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = functional.gelu(self.norm(self.inward(x)))
        q = self.convolution(h.t().unsqueeze(0)).transpose(1, 2).unsqueeze(1)
        attention = functional.scaled_dot_product_attention(q, q, q)
        products = torch.einsum("ij,kj->ik", h, h)
        joined = torch.cat([x, h], dim=1)
        return attention.softmax(-1), products, joined, (x - h[:, :4]).pow(2).sum()


class Starred(nn.Module):
    """Cannot be scripted."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            exact = self.linear(y.to(self.linear.weight.dtype) + x)
            with torch.autocast("cpu", dtype=torch.float16):
                half = exact @ exact.t()
        return y, exact + 1, half


class Einsum(nn.Module):
    """PyTorch has no policy for `einsum`, but for the products that it consists of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,kj->ik", x, x)


class TwoDtypes(nn.Module):
    """Attention weights in half precision, and values in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.expand(2, 2, *x.shape)
        weights = (self.linear(values) @ values.mT).softmax(-1)
        return torch.einsum("bhqk,bhke->bhqe", weights, values)


class Asking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_cpu_enabled():
            return x * 2
        return x + 1


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def autocast(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    with torch.no_grad(), torch.autocast("cpu", request.param):
        yield request.param


@pytest.mark.parametrize("wrap", [lambda module: module, Starred], ids=["scripted", "exported"])
def test_every_policy(wrap: Any, autocast: torch.dtype) -> None:
    net = wrap(Mixed().eval()).eval()
    fast = decorate(net, strict=True)
    result = fast(X)
    assert [t.dtype for t in result] == [autocast, autocast, torch.float32, torch.float32]
    assert_close_to_reference(result, net, (X,))


@pytest.mark.parametrize("wrap", [lambda module: module, Starred], ids=["scripted", "exported"])
@pytest.mark.parametrize("module", [Mixed, Regions, Einsum])
def test_inference_mode(module: type[nn.Module], wrap: Any) -> None:
    """Casts are other operators in inference mode, and weights may be made in it or outside."""
    for made_inside in (False, True):
        with torch.inference_mode(made_inside):
            net = wrap(module().eval()).eval()
        fast = decorate(net, strict=True)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert_close_to_reference(fast(X), net, (X,))


def test_the_setting_is_part_of_the_key() -> None:
    net = Mixed().eval()
    fast: Any = decorate(net, strict=True)
    dtypes = [None, torch.bfloat16, torch.float16, None, torch.bfloat16]
    with torch.no_grad():
        for dtype in dtypes:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                assert fast(X)[0].dtype == (dtype or torch.float32)
                assert_close_to_reference(fast(X), net, (X,))
    info = fast.cache_info()
    assert (info.misses, info.builds, info.entries) == (3, 3, 3)
    assert "float32[3, 4] cpu) autocast cpu bfloat16\n" in str(fast.explain())


def test_capture_leaves_the_autocast_cache_empty() -> None:
    # Autocast keeps the casts of weights that require gradients, by the address of the weight.
    net = Mixed().eval()
    for wrap in (lambda module: module, Starred):
        fast = decorate(wrap(net).eval(), strict=True)
        with torch.autocast("cpu", torch.bfloat16):
            before = net(X)
            fast(X)
            again = net(X)
        assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))


def test_regions_of_other_settings() -> None:
    net = Regions().eval()
    fast = decorate(net, strict=True)
    with torch.no_grad():
        for enabled in (True, False):
            with torch.autocast("cpu", enabled=enabled):
                assert_close_to_reference(fast(X), net, (X,))


@pytest.mark.parametrize("wrap", [lambda module: module, Starred], ids=["scripted", "exported"])
def test_module_querying_autocast(wrap: Any) -> None:
    fast = decorate(wrap(Asking().eval()).eval(), strict=True)
    for enabled in (True, False):
        with torch.no_grad(), torch.autocast("cpu", enabled=enabled):
            assert torch.equal(fast(X), X * 2 if enabled else X + 1)


@pytest.mark.parametrize("rows", [3, 1])  # with 1 there is no sum, and einsum does not cast
def test_einsum_of_two_dtypes(rows: int, caplog: pytest.LogCaptureFixture) -> None:
    net = TwoDtypes().eval()
    fast = decorate(net, strict=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fast(X[:rows]).dtype == net(X[:rows]).dtype
        assert_close_to_reference(fast(X[:rows]), net, (X[:rows],))
    # PyTorch would print a traceback for the product.
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_scripted_program_is_reused_under_autocast() -> None:
    # TorchScript adds casts to graphs that it makes under autocast, by its own rules.
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)).eval()
    fast: Any = decorate(net, strict=True)
    with torch.no_grad():
        with torch.autocast("cpu"):
            assert fast(X).dtype == net(X).dtype
        assert_close_to_reference(fast(X), net, (X,))
    assert "captured by: torchscript" in str(fast.explain())


def test_recordings_with_symbols_are_of_one_setting() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), torch.ones(2) + x.shape[0]

    fast: Any = decorate(Constant().eval(), dynamic=True, compare=False)
    with torch.no_grad():
        assert [y.dtype for y in fast(X)] == [torch.float32, torch.float32]
        with torch.autocast("cpu", torch.bfloat16):
            assert [y.dtype for y in fast(X)] == [torch.bfloat16, torch.float32]
        torch.set_default_dtype(torch.float64)
        try:
            assert [y.dtype for y in fast(X)] == [torch.float32, torch.float64]
        finally:
            torch.set_default_dtype(torch.float32)
    assert fast.cache_info().eager == 0


def test_a_torchscript_module_is_left_to_pytorch() -> None:
    file = io.BytesIO()
    with pytest.warns((DeprecationWarning, FutureWarning)):
        torch.jit.save(torch.jit.script(nn.Linear(4, 8).eval()), file)
        file.seek(0)
        script = torch.jit.load(file)
    fast = decorate(script)
    warned = pytest.warns(TvmifyWarning, match="TorchScript code runs under autocast")
    with torch.no_grad(), torch.autocast("cpu"), warned:
        assert torch.equal(fast(X), script(X))


def test_gradients_use_the_autocast_of_the_call() -> None:
    net = Mixed().eval()
    fast: Any = decorate(net, strict=True)
    for enabled in (True, False):
        gradients = []
        for module in (fast, net):
            net.zero_grad()
            with torch.autocast("cpu", enabled=enabled):
                result = (module(X)[1].float() * torch.arange(9).reshape(3, 3)).sum()
            with torch.autocast("cpu", enabled=not enabled):
                result.backward()
            gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        for ours, eager in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, eager)


def test_save_under_autocast_is_refused(tmp_path: Path) -> None:
    with torch.autocast("cpu"):
        for write in (tvmify.save, tvmify.export):
            with pytest.raises(SaveError, match="autocast"):
                write(nn.Linear(4, 8).eval(), tmp_path / "net.pt", example_inputs=X)
