"""Operators that PyTorch computes inside the compiled program."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tvmify
from tests.compiler.programs import compiled, executed
from tvmify.errors import UnsupportedOperator

IMAGES = torch.randn(1, 3, 8, 8)

# Each has work for TVM before or after the operator.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "aten.grid_sampler_2d.default": (
        lambda x, g: F.grid_sample(2 * x, g, padding_mode="border", align_corners=False).relu(),
        (IMAGES, 2 * torch.rand(1, 4, 4, 2) - 1),
    ),
    "aten.topk.default": (lambda x: [*(2 * x).topk(3), x.relu()], (torch.randn(4, 5),)),
    "aten.sort.stable": (lambda x: tuple((2 * x).sort(stable=True, dim=0)), (torch.randn(4, 5),)),
    "aten.bucketize.Tensor": (
        lambda x, edges: torch.bucketize(2 * x, edges, right=True) + 1,
        (torch.randn(4, 5), torch.tensor([-1.0, 0.0, 1.0])),
    ),
    "aten.histc.default": (lambda x: 2 * torch.histc(2 * x, 4), (torch.randn(20),)),
    # An empty list among the arguments, and a result with indices.
    "aten.max_pool2d_with_indices.default": (
        lambda x: F.max_pool2d(2 * x, 2, stride=(), return_indices=True),
        (IMAGES,),
    ),
    # Results that are not contiguous.
    "aten._linalg_svd.default": (
        lambda x: [2 * part for part in torch.linalg.svd(2 * x, full_matrices=False)],
        (torch.randn(4, 5),),
    ),
    "aten.linalg_inv.default": (lambda x: 2 * torch.linalg.inv(x), (torch.randn(4, 4),)),
    "aten._embedding_bag_forward_only.default": (
        lambda i, w, o: 2 * F.embedding_bag(i, w, o, mode="mean"),
        (torch.randint(0, 9, (6,)), torch.randn(10, 4), torch.tensor([0, 3])),
    ),
    # A list of flags as argument, and None as result.
    "aten.convolution_backward.default": (
        lambda g, x, w: torch.ops.aten.convolution_backward(
            2 * g, x, w, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True]
        )[1:],
        (torch.randn(1, 4, 6, 6), IMAGES, torch.randn(4, 3, 3, 3)),
    ),
    # Complex numbers passed from one operator to the next.
    "aten._fft_r2c.default": (
        lambda x: torch.fft.irfft(torch.fft.rfft(2 * x).conj() * torch.fft.rfft(x)).relu(),
        (torch.randn(3, 8),),
    ),
}


@pytest.mark.parametrize("operator", PROGRAMS)
def test_pytorch_computes_unsupported_operators(operator: str):
    program, args = PROGRAMS[operator]
    artifact = compiled(program, *args)
    assert operator in artifact.report["bridged"]
    assert artifact.report["kernels"]
    actual, expected = executed(artifact, program, *args), program(*args)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_declining_converter_leaves_the_call_to_pytorch():
    artifact = compiled(lambda x: F.max_pool2d(x, 2, return_indices=True)[1] + 1, IMAGES)
    assert artifact.report["bridged"] == {"aten.max_pool2d_with_indices.default": 1}


def test_results_left_out_by_a_converter_come_from_pytorch():
    def program(x: torch.Tensor) -> Any:
        return torch.native_layer_norm(2 * x, [4], None, None, 1e-5)

    x = torch.randn(3, 4)
    artifact = compiled(program, x)
    assert artifact.report["bridged"] == {"aten.native_layer_norm.default": 1}
    torch.testing.assert_close(executed(artifact, program, x), program(x))


def test_unused_result_may_have_another_shape():
    def program(indices: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> Any:
        return F.embedding_bag(indices, weight, offsets, mode="max", include_last_offset=True)

    args = torch.randint(0, 9, (6,)), torch.randn(10, 4), torch.tensor([0, 3, 6])
    artifact = compiled(program, *args)
    assert artifact.report["bridged"] == {"aten._embedding_bag_forward_only.default": 1}
    torch.testing.assert_close(executed(artifact, program, *args), program(*args))


def test_results_never_alias_arguments():
    def program(x: torch.Tensor) -> Any:
        y = x + 1
        return torch.view_as_real(torch.view_as_complex(y)) * 1, y.exp(), x.exp() + 2

    x = torch.randn(64, 2)
    artifact = compiled(program, x)
    torch.testing.assert_close(executed(artifact, program, x), program(x))


def test_expanded_arguments_are_not_copied():
    def program(x: torch.Tensor) -> torch.Tensor:
        return x[:, :1].expand(-1, 5).kthvalue(2, 0).values

    x = torch.randn(7, 5)
    artifact = compiled(program, x)
    assert artifact.report["bridged"] == {"aten.kthvalue.default": 1}
    assert not any("broadcast" in name for name in artifact.report["kernels"])
    torch.testing.assert_close(executed(artifact, program, x), program(x))


def test_numbers_may_be_complex():
    def program(x: torch.Tensor) -> torch.Tensor:
        rotated = x * torch.cos(x) + x * torch.sin(x) * (0.5 - 2j)
        return torch.fft.irfft(rotated * 1j, 14)

    x = torch.randn(3, 8)
    artifact = compiled(program, x)
    torch.testing.assert_close(executed(artifact, program, x), program(x))


def test_complex_results():
    x = torch.randn(8)
    artifact = compiled(torch.fft.fft, x)
    torch.testing.assert_close(executed(artifact, torch.fft.fft, x), torch.fft.fft(x))
    assert artifact.complex == (0,)


def test_weight_only_computation_runs_once():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.linalg.inv(self.weight)

    net, x = Net(), torch.randn(2, 4)
    artifact = compiled(net, x)
    assert artifact.report["bridged"] == {"aten.linalg_inv.default": 1}
    assert artifact.packed[0].startswith("packed")
    with torch.no_grad():
        torch.testing.assert_close(executed(artifact, net, x), net(x), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------- random numbers


def drawn(program: Callable[..., Any], *args: Any) -> list[Any]:
    torch.manual_seed(3)
    return [program(*args) for _ in range(3)]


@pytest.mark.parametrize(
    "program",
    [
        lambda x: (x + torch.rand(4, 5)) * torch.rand(4, 5) - torch.randn(5),
        lambda x: F.dropout(2 * x, 0.5, training=True) + torch.rand_like(x),
        lambda x: torch.bernoulli(x.sigmoid()) + torch.randint(0, 9, (4, 5)),
        lambda x: torch.multinomial(x.sigmoid(), 2) + torch.randperm(2),
    ],
)
def test_random_numbers_match_eager(program: Any):
    x = torch.randn(4, 5)
    artifact = compiled(program, x)
    assert artifact.draws
    actual = drawn(lambda: executed(artifact, program, x))
    torch.testing.assert_close(actual, drawn(program, x))
    assert not torch.equal(actual[0], actual[1])


def test_random_numbers_of_weights_are_drawn_at_each_call():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.dropout(self.weight, 0.5, training=True)

    net = tvmify.tvmify(Noisy().eval(), strict=True, compare=False)
    x = torch.randn(4, 5)
    with torch.no_grad():
        torch.testing.assert_close(drawn(net, x), drawn(Noisy.forward, net, x))


def test_first_call_draws_match_eager():
    def program(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(5)

    x = torch.randn(5)
    torch.testing.assert_close(drawn(tvmify.tvmify(program), x), drawn(program, x))


def test_a_program_without_arguments_draws_in_eager():
    with pytest.raises(UnsupportedOperator, match="takes no tensor"):
        compiled(lambda: torch.rand(3) + 1)


# ------------------------------------------------------------------------------ errors, threads


def test_errors_are_pytorchs_own():
    singular, regular = torch.zeros(3, 3), torch.eye(3)
    artifact = compiled(torch.linalg.inv, regular)
    with pytest.raises(RuntimeError, match="singular"):
        executed(artifact, torch.linalg.inv, singular)
    assert torch.equal(executed(artifact, torch.linalg.inv, regular), regular)


def test_threads_may_call_at_once():
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.sort(0).values * 2

    net = tvmify.tvmify(program, strict=True, compare=False)
    inputs = [torch.randn(50, 3) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for x, result in zip(inputs * 20, threads.map(net, inputs * 20), strict=True):
            assert torch.equal(result, program(x))


def test_explain_names_the_operators():
    net = tvmify.tvmify(lambda x: x.sort(0).values * 2, compare=False)
    net(torch.randn(5))
    assert "computed by PyTorch, inside the program: 1 aten.sort" in str(net.explain())


def test_saved_files_compute_them_as_well(tmp_path: Any):
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sort(0)[0] * 2

    x = torch.randn(5, 3)
    tvmify.save(Net().eval(), tmp_path / "net.pt", example_inputs=(x,))
    loaded = tvmify.load(tmp_path / "net.pt", strict=True)
    with torch.no_grad():
        assert torch.equal(loaded(x), Net()(x))


def test_bits_as_complex_numbers_are_left_to_eager():
    fast = tvmify.tvmify(lambda x: (2 * x).view(torch.complex64) + 1)
    x = torch.randn(4)
    with pytest.warns(tvmify.TvmifyWarning, match=r"aten\.view\.dtype"):
        assert torch.equal(fast(x), (2 * x).view(torch.complex64) + 1)
