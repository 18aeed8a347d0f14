from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tests.cache.programs import artifact_of
from tests.dispatch.nets import Minus, X
from tests.processes import run_python
from tvmify import tvmify as decorate
from tvmify.cache import Key
from tvmify.capture import capture
from tvmify.dispatch import keys
from tvmify.errors import UnsupportedTarget
from tvmify.options import CompileOptions
from tvmify.signature import Signature, TensorSpec
from tvmify.target import Target

CPU = Target("llvm", {"mtriple": "x86_64-unknown-linux-gnu", "mattr": ["+avx2", "+fma"]})
GPU = Target("cuda", {"arch": "sm_80", "host": CPU.attributes})


class Net(nn.Module):
    def __init__(self, slope: float = 0.5) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.slope = slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) * self.slope


class Gelu(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.gelu(self.first(x))) * self.slope


class Rewired(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(torch.relu(self.second(x))) * self.slope


class InATuple(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.second(torch.relu(self.first(x))) * self.slope,)


def key(
    net: nn.Module | None = None,
    args: tuple[Any, ...] = (torch.zeros(2, 4),),
    kwargs: dict[str, Any] | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    target: Target = CPU,
    unpacked: tuple[str, ...] = (),
    **options: Any,
) -> Key:
    """Return the key of a call; arguments that are not given have fixed values."""
    torch.manual_seed(0)
    program = capture((net or Net()).eval(), (torch.zeros(2, 4),), {})
    signature = Signature.of(args, kwargs or {})
    given = weights or {"a": torch.zeros(4, 4), "b": torch.zeros(4, 4)}
    chosen = CompileOptions.of(options)
    return keys.key(program.fingerprint, signature, given, target, chosen, unpacked)


def shared() -> dict[str, torch.Tensor]:
    weight = torch.zeros(4, 4)
    return {"a": weight, "b": weight}


#: A text of the key, and the argument that changes it.
GIVEN: list[tuple[str, dict[str, Any]]] = [
    ("program", {"net": Gelu()}),
    ("program", {"net": Rewired()}),
    ("program", {"net": InATuple()}),
    ("program", {"net": Net(slope=0.25)}),
    ("inputs", {"args": (torch.zeros(3, 4),)}),
    ("inputs", {"args": (torch.zeros(2, 4, dtype=torch.float64),)}),
    ("inputs", {"args": ([torch.zeros(2, 4)],)}),
    ("inputs", {"args": (), "kwargs": {"x": torch.zeros(2, 4)}}),
    ("inputs", {"kwargs": {"flag": True}}),
    ("inputs", {"kwargs": {"flag": 1}}),
    ("weights", {"weights": {"a": torch.zeros(4, 4), "c": torch.zeros(4, 4)}}),
    ("weights", {"weights": {"a": torch.zeros(4, 5), "b": torch.zeros(4, 4)}}),
    ("weights", {"weights": {"a": torch.zeros(4, 4), "b": torch.zeros(4, 4).half()}}),
    ("weights", {"weights": shared()}),
    ("unpacked", {"unpacked": ("a",)}),
    ("target", {"target": Target("llvm", {**CPU.attributes, "mattr": ["+avx2"]})}),
    ("target", {"target": Target("llvm", {**CPU.attributes, "mcpu": "znver4"})}),
    ("options", {"accuracy": "strict"}),
]


@pytest.mark.parametrize(("name", "given"), GIVEN)
def test_each_input_changes_only_its_entry(name: str, given: dict[str, Any]) -> None:
    other = key(**given)
    assert key().differences(other) == [name]
    assert key().digest != other.digest


def autocast() -> Callable[[], object]:
    context = torch.autocast("cpu")
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


def mode(switch: Callable[[Any], object], other: Any, usual: Any) -> Callable[[], Any]:
    def enter() -> Callable[[], object]:
        switch(other)
        return lambda: switch(usual)

    return enter


@pytest.mark.parametrize(
    "enter",
    [
        mode(torch.set_default_dtype, torch.float64, torch.float32),
        mode(torch.set_default_device, "meta", None),
        mode(torch.use_deterministic_algorithms, True, False),
        mode(torch.set_float32_matmul_precision, "medium", "highest"),
        autocast,
    ],
)
def test_modes_of_torch_count(enter: Callable[[], Callable[[], object]]) -> None:
    given = {"args": (torch.zeros(2, 4),), "weights": {"a": torch.zeros(4, 4)}, "net": Net()}
    usual = key(**given)
    leave = enter()
    try:
        other = key(**given)
    finally:
        leave()
    assert usual.differences(other) == ["modes"]


def test_tuning_counts_with_the_model_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = key(tune="quick")
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        if line.startswith(("vendor_id", "model", "CPU part")):
            assert line.partition(":")[2].strip() in tuned.entries["tuned for"]
    monkeypatch.setattr(keys, "_processor_model", lambda: "another")
    assert tuned.differences(key(tune="quick")) == ["tuned for"]


def test_tuning_counts_with_its_threads() -> None:
    threads = torch.get_num_threads()
    tuned = key(tune="quick")
    assert key().differences(tuned) == ["options", "tuned for"]
    torch.set_num_threads(threads + 1)
    try:
        assert tuned.differences(key(tune="quick")) == ["tuned for"]
        assert key().entries["tuned for"] == ""
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "package"),
    [("tvmify", "tvmify"), ("tvm", "apache-tvm"), ("tvm-ffi", "apache-tvm-ffi")],
)
def test_versions_count(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    usual, version = key(), metadata.version
    monkeypatch.setattr(metadata, "version", lambda p: "9.9" if p == package else version(p))
    assert usual.differences(key()) == [name]


def test_the_version_of_torch_counts_with_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = key()
    monkeypatch.setattr(torch, "__version__", f"{torch.__version__.partition('+')[0]}+another")
    assert usual.differences(key()) == ["torch"]


@pytest.mark.parametrize("attribute", ["FORMAT_VERSION", "_compiler_digest"])
def test_the_form_of_artifacts_and_the_compiler_count(
    monkeypatch: pytest.MonkeyPatch, attribute: str
) -> None:
    usual = key()
    other = 99 if attribute == "FORMAT_VERSION" else lambda: "0" * 16
    monkeypatch.setattr(keys, attribute, other)
    assert usual.differences(key()) == ["tvmify"]


def on(device: str) -> Signature:
    """The signature of a call with a tensor on a device that may not exist."""
    return Signature("structure", (TensorSpec((2, 4), device=torch.device(device)), "int 2"))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The version of a fake driver, in a list so that tests can change it."""
    version = ["13.0"]
    monkeypatch.setattr(keys, "_driver_version", lambda: version[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: f"GPU {gpu.index}")
    return version


def key_on(device: str, target: Target = GPU, **options: Any) -> Key:
    chosen = CompileOptions.of(options)
    return keys.key("program", on(device), {"a": torch.zeros(4)}, target, chosen)


@pytest.mark.usefixtures("driver")
def test_gpus_of_one_architecture_share_keys() -> None:
    assert key_on("cuda:0") == key_on("cuda:1")
    other = Target("cuda", {**GPU.attributes, "arch": "sm_90a"})
    assert key_on("cuda:0", other) != key_on("cuda:0")
    assert key_on("cpu", CPU) != key_on("cpu")


def test_cuda_version_affects_only_gpu_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for_cpu, for_gpu = key(), key(target=GPU)
    assert for_cpu.differences(for_gpu) == ["cuda", "inputs", "target", "weights"]
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    assert for_cpu == key()
    assert for_gpu.differences(key(target=GPU)) == ["cuda"]


def test_driver_version_is_part_of_gpu_keys(driver: list[str]) -> None:
    here, without = key_on("cuda:0", tune="quick"), key_on("cpu", tune="quick")
    assert here.entries["cuda"].endswith("driver: 13.0")
    assert without.entries["cuda"].endswith("driver: any")
    driver[0] = "12.8"
    assert here.differences(key_on("cuda:0", tune="quick")) == ["cuda"]
    assert keys.key_without_gpu(here) == without
    assert keys.key_without_gpu(without) is None


def test_driver_is_not_queried_for_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_driver_version", lambda: pytest.fail("asked for"))
    assert keys.key_without_gpu(key_on("cpu", CPU)) is None
    assert key_on("cpu").entries["cuda"].endswith("driver: any")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_driver_a_gpu_is_refused() -> None:
    with pytest.raises(UnsupportedTarget, match="no driver for NVIDIA GPUs"):
        key_on("cuda:0")


@pytest.mark.usefixtures("driver")
def test_tuning_on_a_gpu_counts_with_its_name() -> None:
    assert key_on("cuda:1", tune="quick").entries["tuned for"] == "GPU 1"
    assert key_on("cuda:1").entries["tuned for"] == ""
    assert key_on("cpu", tune="quick").entries["tuned for"] == ""
    text = keys.processor(key_on("cuda:1", tune="quick"))
    assert "GPU 1" in text and "driver: 13.0" in text and torch.__version__ in text
    assert torch.__version__ not in keys.processor(key_on("cpu", CPU)).splitlines()


def test_the_gpu_of_a_call_names_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {torch.device("cuda:1"): (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    for option in (None, "cuda"):
        assert keys.target_of_call(on("cuda:1"), {}, option).attributes["arch"] == "sm_90a"
    with pytest.raises(UnsupportedTarget, match="inputs and weights are on cpu, cuda:1"):
        keys.target_of_call(on("cuda:1"), {"a": torch.zeros(2)}, None)


def test_autocast_of_another_device_is_refused() -> None:
    option = {"kind": "cuda", "arch": "sm_80"}
    assert keys.target_of_call(on("cpu"), {}, option).device == "cuda"
    with (
        torch.autocast("cpu"),
        pytest.raises(UnsupportedTarget, match="differs from autocast"),
    ):
        keys.target_of_call(on("cpu"), {}, option)


def test_a_call_is_for_the_device_of_its_tensors() -> None:
    args, elsewhere = (torch.zeros(2, 4), 3), {"kind": "cuda", "arch": "sm_80"}
    for option in (None, "llvm", {"kind": "llvm"}):
        keys.check_place(option, Signature.of(args, {}))
    keys.check_place(elsewhere, Signature.of((3,), {}))
    for option in ("cuda", elsewhere):
        with pytest.raises(
            UnsupportedTarget, match="inputs are on 'cpu', but the target is 'cuda'"
        ):
            keys.check_place(option, Signature.of(args, {}))


def test_every_entry_has_a_test() -> None:
    tested = {name for name, _ in GIVEN} | {"modes", "tuned for", "tvmify", "tvm", "tvm-ffi"}
    assert set(key().entries) == tested | {"torch"}


def test_key_ignores_runtime_options_weights_and_strides() -> None:
    usual = key()
    assert usual == key()
    assert usual == key(strict=True, compare=False, cache=False, cache_size=3, progress=True)
    assert usual == key(cuda_graph=True)
    weights = {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}
    assert usual == key(weights=weights, args=(torch.ones(2, 4),))
    # Code reads a contiguous copy of other tensors.
    assert usual == key(args=(torch.zeros(4, 2).t(),))


PRINT_KEYS = """
import sys
import torch
from tvmify.dispatch.work import Work
from tvmify import tvmify
from tvmify.errors import BuildError
from tests.dispatch.test_keys import Gelu, InATuple, Net

def show(work, *_):
    print(work.key.digest)
    raise BuildError("no build", "This is a test.")

Work.build = show

@tvmify(strict=False, cache=False)
def function(values, *, names=frozenset({"a", "b", "c", "dd"}), **more):
    return {name: values["x"] * len(name) for name in sorted(names)}, more["z"]

with torch.inference_mode():
    x = torch.zeros(2, 4)
    for net in (Net(), Gelu(), InATuple()):
        tvmify(net.eval(), cache=False, progress=False)(x)
    function({"x": x, "y": [x, 1, "text"]}, z=x, w=None)
"""


def test_keys_do_not_depend_on_the_hash_seed() -> None:
    first = run_python(PRINT_KEYS, PYTHONHASHSEED="1").stdout
    assert len(set(first.split())) == len(first.split()) >= 4
    assert run_python(PRINT_KEYS, PYTHONHASHSEED="4242").stdout == first


def test_code_without_pytorch_calls_is_shared_across_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = key()
    plain, calling = artifact_of(0), artifact_of(0)
    calling = dataclasses.replace(calling, library=b"main\0tvmify.aten\0")
    assert keys.key_of(ours, calling) == ours
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    theirs = key()
    assert keys.key_of(ours, plain) == keys.key_of(theirs, plain) == keys.key_for_any_torch(ours)
    assert keys.key_of(ours, calling) != keys.key_of(theirs, calling)
    # A version that does not matter is not a difference.
    assert theirs.differences(keys.key_of(ours, plain)) == []


def test_gpu_code_is_tied_to_one_pytorch_version() -> None:
    assert keys.key_for_any_torch(key(target=GPU)) == key(target=GPU)


class ReversedMinus(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y - x


class MinusTwice(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - 2 * y


def test_different_wiring_or_constants_are_different_programs(inference: None) -> None:
    for cls in (Minus, ReversedMinus, MinusTwice):
        fast = decorate(cls().eval(), strict=True)
        assert torch.equal(fast(X, X * 3), cls()(X, X * 3))
        assert fast.cache_info().builds == 1


def test_a_cpu_feature_is_part_of_the_key(inference: None) -> None:
    features = [f"+{name}" for name in tvmify.runtime.cpu_features()]  # type: ignore[attr-defined]
    smaller = [name for name in features if "avx512" not in name]
    for mattr in (features, smaller):
        target = {"kind": "llvm", "mattr": mattr}
        fast: Any = decorate(Minus().eval(), target=target, strict=True)
        assert torch.equal(fast(X, X * 3), X - X * 3)
        assert fast.cache_info().builds == int(mattr is features or smaller != features)
