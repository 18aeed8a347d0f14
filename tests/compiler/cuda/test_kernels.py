"""Kernels for GPUs, and the host code that launches them, give right results on the CPU.

The library is the one that runs on a GPU, except for the cubin: kernels are TVM's CUDA C++,
compiled by the C++ compiler of this machine.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.gpu_programs import ALWAYS_A_KERNEL, exported, gpu, kernels_on_cpu
from tests.compiler.nets import Block, Residual
from tests.compiler.programs import as_module, executed, target
from tests.tolerances import assert_close_to_reference
from tvmify.compiler import compile
from tvmify.compiler.codegen import build

_AXES = [f"{kind}.{axis}" for kind in ("blockIdx", "threadIdx") for axis in "xyz"]

Check = Callable[..., dict[str, str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    """Compile and run a program, compare it with eager, and return the rules of its kernels."""
    from tvmify.compiler.cuda import kernels

    registered: list[str] = []

    def on_cpu(ir_mod: Any, tvm_target: Any) -> None:
        with kernels._without_runtime():
            source = str(kernels.codegen_build(ir_mod, tvm_target).inspect_source("cuda"))
        functions = {
            str(function.attrs["global_symbol"]): [
                str(tag) for tag in function.attrs["tirx.kernel_launch_params"]
            ]
            for _, function in ir_mod.functions_items()
        }
        library = ctypes.CDLL(str(kernels_on_cpu(source, tmp_path)))
        for name, tags in functions.items():
            _register(name, tags, getattr(library, f"launch_{name}"))
        registered.extend(functions)

    monkeypatch.setattr(build.kernels, "generate", on_cpu)
    monkeypatch.setattr("tvmify.compiler.Artifact", _for_this_machine)

    def compared(program: Callable[..., Any], *args: Any, **options: Any) -> dict[str, str]:
        artifact = compile(exported(program, *args), gpu(), **options)
        with torch.no_grad():
            result = executed(artifact, program, *args)
        assert_close_to_reference(result, as_module(program), args)
        return dict(artifact.report["kernels"])

    yield compared
    from tvm_ffi.registry import remove_global_func

    for name in registered:
        remove_global_func(name)


def _for_this_machine(**fields: Any) -> Any:
    from tvmify.artifact import Artifact

    return Artifact(**{**fields, "target": str(target())})


def _register(name: str, tags: list[str], launch: Any) -> None:
    import tvm

    def run(*given: Any) -> None:
        tensors, extents = given[: -len(tags)], given[-len(tags) :]
        named = dict(zip(tags, extents, strict=True))
        values = [ctypes.c_void_p(tensor.value) for tensor in tensors]
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        sizes = (ctypes.c_int64 * 6)(*(named.get(axis, 1) for axis in _AXES))
        launch(places, sizes)

    tvm.register_global_func(name, run, override=True)
    tvm.register_global_func("__tvm_set_device", lambda *device: None, override=True)


@pytest.mark.parametrize(("columns", "rule"), [(37, "fallback"), (36, "elementwise")])
def test_elements(check: Check, columns: int, rule: str):
    def elements(x: torch.Tensor, y: torch.Tensor, row: torch.Tensor) -> list[torch.Tensor]:
        gated = F.silu(x * row) * y + F.gelu(x)
        chosen = torch.where(x > y, x, y).flip(0)
        joined = torch.cat([x, y * 2], 0).relu()[2:8] - x[:, :1]
        return [gated, x.mT + 1, torch.cat([x, y * 2], 1)[:, 3:], chosen, joined, x + x.sum()]

    rules = check(elements, torch.randn(6, columns), torch.randn(6, columns), torch.randn(columns))
    assert next(found for name, found in rules.items() if "gelu" in name) == rule, rules


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [(64, torch.float16), (12, torch.float16), (20, torch.float32), (7, torch.float32)],
    ids=str,
)
def test_threads_move_and_compute_neighbours(check: Check, columns: int, dtype: torch.dtype):
    def several(
        x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor
    ) -> list[torch.Tensor]:
        moved = [torch.cat([x, y], 1), F.pad(x, (0, 0, 1, 2)), x[:, rows], x[:, 1:3] + 0]
        chosen = [torch.where(mask, x, y), x.masked_fill(mask, 2), x * mask]
        joined = torch.cat([x, y], 1) * 2 + torch.cat([y, x], 1).relu()
        cast = [x.float() * 2, x.half() + 1, (x * 9).int() + 1, (x * 9).long().to(x.dtype)]
        return [*moved, *chosen, *cast, joined, x.unsqueeze(1).expand(3, 2, 5, -1) + x[:, None, :1]]

    x, y = (torch.randn(3, 5, columns).to(dtype) for _ in range(2))
    mask, rows = torch.rand(3, 5, columns) > 0.5, torch.tensor([4, 0, 4, -2])
    rules = check(several, x, y, mask, rows)
    is_even = columns % 2 == 0
    assert (Counter(rules.values())["elementwise"] >= 10) == is_even, rules
    named = {name: rule for name, rule in rules.items() if "concat" in name or "where" in name}
    assert set(named.values()) == ({"elementwise"} if is_even else {"fallback"}), rules


def test_convolutions_and_pools(check: Check):
    rules = check(Residual().eval(), torch.randn(2, 3, 32, 32))
    assert "reduction" in rules.values()


@pytest.mark.parametrize(
    ("channels", "dtype"),
    [(7, torch.float32), (12, torch.float16), (64, torch.float32), (64, torch.float16)],
    ids=str,
)
def test_pools_read_neighbours_at_once(check: Check, channels: int, dtype: torch.dtype):
    def pooled(x: torch.Tensor) -> list[torch.Tensor]:
        stem = F.conv2d(x, x[:1, :, :1, :1])[..., :1] + x  # channels last, as in a network
        sums = F.avg_pool2d(stem, 2, 2), F.avg_pool2d(stem, 3, 2, 1, count_include_pad=False)
        return [F.max_pool2d(stem, 3, 2, 1), F.max_pool2d(stem, (2, 3)), *sums]

    rules = check(pooled, torch.randn(3, channels, 9, 11, dtype=dtype))
    assert list(rules.values()).count("window") == 2, rules


def test_windows_of_computed_values(check: Check):
    def several(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [F.gelu(x).amax(1), (x.float() * 2).amin(1), (x * y).amax(1), x[:, :, 1:9].amax(1)]

    x, y = torch.randn(2, 6, 5, 16).half(), torch.randn(2, 6, 5, 16).half()
    check(several, x, y)


def test_a_transformer(check: Check):
    mask = torch.rand(2, 1, 6, 6) > 0.3
    mask[..., 0] = True
    check(Block().eval(), torch.randn(2, 6, 32), mask)


@pytest.mark.parametrize("shape", [(4, 5, 7), (3, 2, 700), (40, 33, 2), (2, 1, 2050)], ids=str)
def test_sums(check: Check, shape: tuple[int, ...]):
    def sums(x: torch.Tensor) -> list[torch.Tensor]:
        rows = [x.sum(-1), x.mean(1), x.sum(0), x.sum((0, 2)), x.mean(), x.sum()]
        return [*rows, x - x.mean(-1, keepdim=True), x / x.norm(dim=-1, keepdim=True)]

    rules = check(sums, torch.randn(*shape))
    assert list(rules.values()).count("reduction") >= 4


def test_reductions_to_one_number(check: Check):
    def numbers(x: torch.Tensor) -> list[torch.Tensor]:
        names = "mean sum argmax std norm prod any"
        found = [getattr(torch, name)(x) for name in names.split()]
        found += [getattr(torch, name)(x, (0, 1)) for name in ("amax", "amin", "logsumexp")]
        return [*found, *(number * 2 for number in found), x.mean((0, 1), keepdim=True)]

    check(numbers, torch.rand(40, 53))


def test_extremes_and_variances(check: Check):
    def several(x: torch.Tensor) -> list[torch.Tensor]:
        largest = [x.amax(-1), x.amin(0), x.argmax(-1), x.argmin(1), x.max(1).values]
        return [*largest, x.var(1), x.std((0, 2)), x.logsumexp(-1), (x > 1).any(-1), x.prod(-1)]

    rules = check(several, torch.randn(3, 40, 9))
    assert "general reduction" in rules.values()


def test_norms_of_groups(check: Check):
    net = nn.Sequential(nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True)).eval()
    check(net, torch.randn(2, 6, 9, 7))
    check(nn.RMSNorm(130), torch.randn(5, 130))


def test_nan_propagates(check: Check):
    x = torch.randn(5, 70)
    x[1, 3], x[2, 5], x[3, 69] = float("nan"), float("inf"), -float("inf")
    check(lambda x: [x.amax(-1), x.amin(0), F.relu(x), x.sum(0), x.maximum(x.flip(0))], x)
    rules = check(lambda x: F.max_pool2d(x[None, None], 3, 2, 1), x)
    assert rules["max_pool"] == "window"


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 128), torch.float32),
        ((1, 1, 2304), torch.float32),
        ((1, 1, 200), torch.float32),
        ((1, 13001), torch.float32),
        ((1, 768), torch.float16),
        ((1, 1, 3072), torch.float16),
    ],
    ids=str,
)
def test_rows_times_weights(check: Check, shape: tuple[int, ...], dtype: torch.dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            wide = shape[-1]
            self.layers = nn.Sequential(
                nn.Linear(wide, 150), nn.GELU(), nn.Linear(150, 132, bias=False)
            )
            self.transposed = nn.Parameter(torch.randn(132, 129) / 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layers(x) @ self.transposed + x[..., :1])

    rules = check(Net().eval().to(dtype), torch.randn(*shape, dtype=dtype), tuning=ALWAYS_A_KERNEL)
    found = Counter(rules.values())
    assert found["row product"] + found["uneven row product"] == 3
    assert found["row product"] == (shape[-1] % 128 == 0)
    assert any("gelu" in name and "row_product" in name for name in rules)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (264, torch.float32),
        (266, torch.float16),
        (267, torch.float16),
        (40, torch.float32),
        (8729, torch.float16),  # more than run at once, 29 per block
    ],
    ids=str,
)
def test_threads_divide_weight_rows_evenly(check: Check, rows: int, dtype: torch.dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(512, rows)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return residual + F.relu(self.layer(x))

    row, residual = torch.randn(1, 512, dtype=dtype), torch.randn(1, rows, dtype=dtype)
    rules = check(Net().eval().to(dtype), row, residual)
    assert Counter(rules.values())["row product"] == 1
    assert sum("relu" in name for name in rules) == 1  # it contains everything else


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_decoding_step_fuses_adds_and_does_not_copy(check: Check, dtype: torch.dtype):
    class Step(nn.Module):
        """One layer of a decoder that caches keys and values, written as in GPT-2."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(256)
            self.weights = nn.ParameterList(
                torch.randn(*shape) / 16 for shape in ((256, 768), (256, 256), (256, 512))
            )
            self.biases = nn.ParameterList(torch.randn(width) for width in (768, 256, 512))
            self.narrow = nn.Linear(512, 256)

        def project(self, x: torch.Tensor, number: int) -> torch.Tensor:
            weight, bias = self.weights[number], self.biases[number]
            return torch.addmm(bias, x.view(-1, 256), weight).view(1, 1, -1)

        def forward(
            self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> list[torch.Tensor]:
            projected = self.project(self.norm(x), 0).split(256, -1)
            query, key, value = (one.view(1, 1, 4, 64).transpose(1, 2) for one in projected)
            keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
            seen = F.scaled_dot_product_attention(query, keys, values)
            x = x + self.project(seen.transpose(1, 2).reshape(1, 1, 256), 1)
            x = x + self.narrow(F.gelu(self.project(self.norm(x), 2), approximate="tanh"))
            return [x, keys, values]

    past = [torch.randn(1, 4, 5, 64, dtype=dtype) for _ in range(2)]
    rules = check(Step().eval().to(dtype), torch.randn(1, 1, 256, dtype=dtype), *past)
    called = [name for name in rules if "row_product" in name or "concatenate" in name]
    assert sum("row_product" in name for name in called) == 4
    # Others pack weights, or are views.
    others = [name for name in rules if name not in called]
    assert not any("add" in name or "fused_reshape" in name for name in others), others


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(192, torch.float32), (256, torch.float16), (100, torch.float16)],
    ids=str,
)
def test_a_residual_and_its_norm_are_one_kernel(check: Check, width: int, dtype: torch.dtype):
    class Layers(nn.Module):
        """The sum of the first layer is read again, the sum of the second is not."""

        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
            for norm in self.norms:
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = 3 + x + self.layers[0](x)
            x = x + self.layers[1](self.norms[0](x))
            return self.norms[1](x)

    rules = check(Layers().eval().to(dtype), torch.randn(2, 5, width, dtype=dtype))
    # Both norms call the same kernel, and only the operator before the first one adds.
    is_shared = width != 100
    assert Counter(rules.values())["norm"] == is_shared
    assert sum("add" in name for name in rules) == (1 if is_shared else 2), rules


def test_norms_of_other_sums(check: Check):
    def norms(x: torch.Tensor, y: torch.Tensor, row: torch.Tensor) -> list[torch.Tensor]:
        sums = [x + x, x + row, x + 1, x[:1, :1] + row]
        return [F.layer_norm(total, (128,)) for total in [*sums, x + y]]

    x, y = torch.randn(2, 2, 3, 128)
    rules = check(norms, x, y, torch.randn(128))
    assert Counter(rules.values())["norm"] == 3  # of the last, of one row, and of others
    assert sum("residual_sum" in name for name in rules) == 1  # of the last


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 768), torch.float16),
        ((1, 768), torch.float16),
        ((3, 2, 192), torch.float32),
        ((5, 64), torch.float16),
        ((2, 8192), torch.float16),
        ((2, 33), torch.float32),
        ((2, 8448), torch.float32),
        ((64,), torch.float32),
    ],
    ids=str,
)
def test_norms_are_kernels_where_threads_share_rows_evenly(
    check: Check, shape: tuple[int, ...], dtype: torch.dtype
):
    net = nn.LayerNorm(shape[-1], eps=1e-3)
    nn.init.normal_(net.weight)
    nn.init.normal_(net.bias)
    rules = check(net.eval().to(dtype), 5 + torch.randn(*shape, dtype=dtype))
    is_shared = len(shape) > 1 and shape[-1] % 64 == 0 and shape[-1] < 8448
    assert Counter(rules.values())["norm"] == is_shared
