"""Programs for GPUs are built without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.gpu_programs import cross_built, exported, gpu, needs_nvcc
from tests.compiler.nets import Bags, Block, Residual
from tvmify.compiler import compile
from tvmify.compiler.cuda import nvcc, nvrtc
from tvmify.errors import BuildError, UnsupportedTarget

needs_nvrtc = pytest.mark.skipif(nvrtc.find() is None, reason="there is no NVRTC here")


@needs_nvcc
@pytest.mark.parametrize(
    ("arch", "dtype"), [("sm_80", torch.float32), ("sm_90a", torch.float16)], ids=str
)
def test_convolutions(arch: str, dtype: torch.dtype):
    net, image = Residual().eval().to(dtype), torch.randn(2, 3, 16, 16, dtype=dtype)
    artifact = cross_built(net, image, arch=arch)
    assert artifact.target == str(gpu(arch))
    assert not artifact.report["bridged"]
    assert artifact.library.count(b"aten::convolution") == 2
    assert artifact.library.count(b"aten::linear") == 1
    assert "reduction" in artifact.report["kernels"].values()


@needs_nvcc
@pytest.mark.parametrize(
    ("arch", "dtype"), [("sm_90a", torch.bfloat16), ("sm_80", torch.float16)], ids=str
)
def test_a_transformer(arch: str, dtype: torch.dtype):
    net, x = Block().eval().to(dtype), torch.randn(2, 6, 32, dtype=dtype)
    artifact = cross_built(net, x, torch.ones(2, 1, 1, 6, dtype=torch.bool), arch=arch)
    assert artifact.library.count(b"aten::scaled_dot_product_attention") == 1
    # Each projection includes its bias, and attention reads the projections in place.
    assert b"aten::linear" in artifact.library
    assert b"aten::matmul" not in artifact.library
    # Weights of the projections are joined when they are packed, once.
    kernels = [name for name in artifact.report["kernels"] if "concatenate" not in name]
    assert not any("transpose" in name for name in kernels)


@needs_nvcc
def test_unsupported_loops_are_left_to_pytorch():
    artifact = cross_built(Bags().eval(), torch.randint(20, (3, 5)))
    assert artifact.report["bridged"] == {"aten.embedding.default": 1}


@needs_nvcc
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_functions_of_elements(dtype: torch.dtype):
    names = "exp expm1 log log1p sin cos tan tanh sigmoid erf sqrt rsqrt round floor abs relu"

    def every(x: torch.Tensor) -> list[torch.Tensor]:
        results = [getattr(torch, name)(x) for name in names.split()]
        flags = [x.isnan(), x > 0, x.maximum(x.flip(0)).clamp(min=float("-inf"))]
        return [*results, *flags, x.amax(-1), x.argmax(-1), x.std(-1), x.logsumexp(0)]

    cross_built(every, torch.rand(4, 32).to(dtype))  # several at once
    if dtype is torch.float32:
        cross_built(every, torch.rand(4, 33))


@needs_nvcc
def test_half_numbers_in_a_program_of_float32():
    cross_built(
        lambda mask, x: torch.where(mask, x, 0).half() + x, torch.ones(4, 33) > 0, torch.ones(4, 33)
    )
    cross_built(lambda mask, x: mask.half() + x, torch.ones(4, 33) > 0, torch.ones(4, 33))


@needs_nvcc
def test_nvcc_failure_is_an_error():
    with pytest.raises(BuildError, match="nvcc for sm_10"):
        compile(exported(torch.relu, torch.zeros(4)), gpu("sm_10"))


def test_missing_compiler_names_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvcc, "find", lambda: None)
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match="nvcc on PATH, or `pip install cuda-bindings nvidia-"):
        compile(exported(torch.relu, torch.zeros(4)), gpu())


@needs_nvrtc
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_nvrtc_is_the_fallback_of_nvcc(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvcc, "find", lambda: None)
    cross_built(Residual().eval().to(dtype), torch.randn(2, 3, 16, 16).to(dtype))
    cross_built(lambda x: [x.tanh() / x.sin(), x > 0, x.amax(-1)], torch.rand(4, 32).to(dtype))
    with pytest.raises(BuildError, match="NVRTC for sm_10"):
        compile(exported(torch.relu, torch.zeros(4)), gpu("sm_10"))


@needs_nvrtc
def test_nvrtc_uses_no_fast_math():
    source = 'extern "C" __global__ void f(float* x) { x[0] = sinf(x[1]) / x[2] + sqrtf(x[3]); }'

    def compiled(*options: str) -> bytes:
        return nvrtc.compile(source, "80", [*nvcc._BOTH, *options])

    usual = compiled()
    assert usual == compiled("--ftz=false", "--prec-div=true", "--prec-sqrt=true")
    assert usual != compiled("--use_fast_math")


def test_nvcc_is_found_where_the_toolkit_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvcc"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert nvcc.find() == str(program)


def test_results_on_another_device_are_refused():
    with pytest.raises(UnsupportedTarget, match="inputs are on cpu, results on meta"):
        compile(exported(lambda x: x.to("meta"), torch.zeros(4)), gpu())


def test_a_loop_without_a_schedule_is_an_error(monkeypatch: pytest.MonkeyPatch):
    from tvmify.compiler import pipeline

    without = replace(pipeline.backend_of(pipeline.tvm_target(gpu())), rules={})
    monkeypatch.setitem(pipeline._BACKENDS, "cuda", without)
    with pytest.raises(BuildError, match="no rule for GPUs schedules 'relu'"):
        compile(exported(torch.relu, torch.zeros(4)), gpu())


def test_kernels_take_the_place_of_their_source():
    from tvmify.compiler.cuda.kernels import with_fatbin

    def text(content: bytes) -> bytes:
        return len(content).to_bytes(8, "little") + content

    def packed(form: bytes, code: bytes) -> bytes:
        tree = b"".join(n.to_bytes(8, "little") for n in (2, 0, 1, 1, 1))
        module = text(form) + b"table" + text(code)
        content = tree + text(b"_lib") + text(b"cuda") + text(module) + text(b"vm") + text(b"...")
        return text(content)

    assert with_fatbin(packed(b"cuda", b"source"), b"source", b"ELF") == packed(b"cubin", b"ELF")
    for damaged in (packed(b"ptx", b"source"), packed(b"cuda", b"another")):
        with pytest.raises(RuntimeError, match="in an unknown format"):
            with_fatbin(damaged, b"source", b"ELF")


@needs_nvcc
def test_an_mlp_is_built_the_same_twice():
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()
    first, second = (cross_built(net, torch.randn(2, 8)) for _ in range(2))
    assert first.report["kernels"] == second.report["kernels"] == {"gelu": "elementwise"}
    assert first.packed == second.packed


@needs_nvcc
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_vectors_compile_in_rows_of_any_length(dtype: torch.dtype):
    def moved(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        joined = torch.cat([x[:, :8], y], 0)
        return [joined, joined * 2, x[:, :8] * 2 + y, F.pad(y, (0, 0, 1, 1)), y.mT[:, :3] + 1]

    cross_built(moved, torch.randn(6, 9).to(dtype), torch.randn(6, 8).to(dtype))
