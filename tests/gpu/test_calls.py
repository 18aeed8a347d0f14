"""Calls on a GPU: their results, devices, streams, memory and graphs."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tests.gpu.nets import NETS, image, mlp
from tests.threads import together
from tests.tolerances import assert_close_to_reference
from tvmify.dispatch import keys

pytestmark = pytest.mark.usefixtures("inference")

CUDA = torch.version.cuda


def on_gpu(name: str, dtype: torch.dtype = torch.float32, device: str = "cuda") -> tuple[Any, Any]:
    """Return a network and an argument for it; ``NETS[name][1]`` makes more."""
    make, argument = NETS[name]
    return make().eval().to(device, dtype), moved(argument(), dtype, device)


def moved(x: torch.Tensor, dtype: torch.dtype, device: str = "cuda") -> torch.Tensor:
    return x.to(device, dtype if x.is_floating_point() else None)


def compiled(net: nn.Module, **options: Any) -> Any:
    return tvmify.tvmify(net, strict=True, **options)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_results_are_eagers(name: str, dtype: torch.dtype, cuda_graph: bool):
    net, _ = on_gpu(name, dtype)
    fast = compiled(net, cuda_graph=cuda_graph)
    results = []
    for _ in range(4):
        x = moved(NETS[name][1](), dtype)
        results.append((fast(x), x))
    for result, x in results:  # none is overwritten by a later call
        assert_close_to_reference(result, net, (x,))
    assert "runs compiled" in str(fast.explain())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_eagers(dtype: torch.dtype):
    net, x = on_gpu("convolutional")
    with torch.autocast("cuda", dtype):
        result, expected = compiled(net)(x), net(x)
    assert result.dtype == expected.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)


def test_channels_last_is_as_good():
    net, x = on_gpu("convolutional")
    net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    assert_close_to_reference(compiled(net)(x), net, (x,))


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_calls_follow_the_current_stream(cuda_graph: bool):
    net, x = on_gpu("mlp")
    fast = compiled(net, cuda_graph=cuda_graph)
    expected = net(x)
    for _ in range(3):
        fast(x)
    for _ in range(10):
        stream = torch.cuda.Stream()
        late = torch.zeros_like(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)  # delays the argument on this stream only
            late.copy_(x)
            result = fast(late)
        stream.synchronize()
        torch.testing.assert_close(result, expected)


def test_a_call_does_not_wait_for_the_gpu():
    net, x = on_gpu("mlp")
    fast = compiled(net)
    fast(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    done = torch.cuda.Event()
    fast(x)
    done.record()
    assert not done.query()


def test_threads_with_separate_streams():
    net, x = on_gpu("block")
    fast = compiled(net)
    expected = net(x)
    fast(x)
    torch.cuda.synchronize()

    def work() -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                assert torch.allclose(fast(x), expected, rtol=1e-3, atol=1e-3)

    together([work] * 4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_the_second_gpu(cuda_graph: bool):
    net, x = on_gpu("convolutional", device="cuda:1")
    fast = compiled(net, cuda_graph=cuda_graph)
    for _ in range(3):
        result = fast(x)
        assert result.device == x.device and torch.cuda.current_device() == 0
        assert_close_to_reference(result, net, (x,))


def test_memory_is_pytorchs():
    net, x = on_gpu("convolutional")
    fast = compiled(net)
    fast(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = fast(x)
    assert torch.cuda.memory_allocated() - before < 4096
    result.record_stream(torch.cuda.Stream())
    result.resize_(1000)
    del result
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_new_weights_take_effect(cuda_graph: bool):
    net, x = on_gpu("mlp")
    fast = compiled(net, cuda_graph=cuda_graph)
    for _ in range(3):
        with torch.no_grad():
            for parameter in fast.parameters():
                parameter.copy_(torch.randn_like(parameter) / 10)
        for _ in range(3):
            torch.testing.assert_close(fast(x), copy.deepcopy(net)(x), rtol=1e-3, atol=1e-3)


def test_a_graph_captured_by_the_user_includes_the_kernels():
    net, x = on_gpu("mlp")
    fast = compiled(net, cuda_graph=True)
    for _ in range(3):
        fast(x)
    given, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fast(given)
    given.copy_(other := torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(result, net(other), rtol=1e-3, atol=1e-3)


def test_random_program_is_not_a_graph():
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + torch.rand_like(x)

    fast: Any = tvmify.tvmify(noisy, strict=True, cuda_graph=True)
    x = torch.zeros(64, device="cuda")
    assert len({fast(x).sum().item() for _ in range(4)}) == 4
    assert "draws random numbers" in str(fast.explain())


def test_a_file_runs_on_both_devices(tmp_path: Path):
    net, x = NETS["convolutional"][0]().eval(), image()
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
    other = "sm_80" if arch != "sm_80" else "sm_86"
    targets = [{"kind": "cuda", "arch": name} for name in (other, arch)]
    file = tmp_path / "model.pt"
    tvmify.save(net, file, example_inputs=x, targets=[None, *targets])
    loaded = tvmify.load(file, strict=True)
    expected = net(x)
    for device in ("cpu", "cuda", "cpu", "cuda"):
        loaded.to(device)
        result = loaded(x.to(device))
        assert result.device.type == device
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-2, atol=1e-2)


def test_a_file_without_code_for_the_gpu_is_interpreted_there(tmp_path: Path):
    net, x = mlp().eval(), torch.randn(8, 64)
    tvmify.save(net, tmp_path / "model.pt", example_inputs=x)
    loaded = tvmify.load(tmp_path / "model.pt").to("cuda")
    with pytest.warns(UserWarning, match="code for the CPU, and the tensors are on cuda"):
        result = loaded(x.to("cuda"))
    torch.testing.assert_close(result.cpu(), net(x), rtol=1e-3, atol=1e-3)


def test_a_module_may_go_while_its_kernels_run_and_others_are_captured():
    nets = [on_gpu(name) for name in ("mlp", "block")]
    (gone, x), (fast, y) = ((compiled(net), given) for net, given in nets)
    expected = nets[0][0](x)
    for _ in range(2):
        gone(x)
        fast(y)
    torch.cuda._sleep(100_000_000)
    result = gone(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fast(y)
        del gone
        gc.collect()
    compiled(nn.ReLU().eval())(x)  # deleted programs are unloaded now
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
    graph.replay()
    torch.cuda.synchronize()


def test_the_driver_serves_the_cuda_of_pytorch():
    served, used = (str(version).split(".")[0] for version in (keys._driver_version(), CUDA))
    assert int(served) >= int(used)
