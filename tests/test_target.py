from __future__ import annotations

import json
from typing import Any

import pytest

from tvmify.errors import OptionError, UnsupportedTarget
from tvmify.target import Target, arch_of, check, target_for

FEATURES = ["fma", "avx2", "avx"]


def on_gpu(option: Any = None, capability: tuple[int, int] | None = (8, 0)) -> Target:
    return target_for(option, "cuda", FEATURES, capability)


def test_text_is_complete() -> None:
    for target in (target_for(None, "cpu", FEATURES), on_gpu()):
        assert Target.parse(str(target)) == target
        assert list(json.loads(str(target))) == sorted(json.loads(str(target)))


def test_without_an_option_the_device_decides() -> None:
    assert target_for(None, "cpu", FEATURES).device == "cpu"
    assert on_gpu().device == "cuda"


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((7, 5), "sm_75"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100")],
)
def test_a_gpu_names_its_architecture(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(*capability) == arch
    for option in (None, "cuda", {"kind": "cuda"}):
        assert on_gpu(option, capability).attributes["arch"] == arch


def test_an_architecture_can_be_built_for_without_a_gpu() -> None:
    option = {"kind": "cuda", "arch": "sm_90a"}
    elsewhere = target_for(option, "cpu", FEATURES)
    assert elsewhere == on_gpu(option) == on_gpu("cuda", (9, 0))
    assert (
        on_gpu({**option, "max_threads_per_block": 512}).attributes["max_threads_per_block"] == 512
    )


@pytest.mark.parametrize(
    ("option", "device"), [("cuda", "cpu"), ({"kind": "cuda"}, "cpu"), ("llvm", "cuda")], ids=str
)
def test_tensors_elsewhere_are_refused(option: Any, device: str) -> None:
    capability = (8, 0) if device == "cuda" else None
    with pytest.raises(UnsupportedTarget, match=f"on '{device}' and the target is .* sm_90a|move"):
        target_for(option, device, FEATURES, capability)


@pytest.mark.parametrize("option", [None, "llvm", "cuda", {"kind": "cuda", "arch": "sm_80"}])
def test_unsupported_device_is_refused(option: Any) -> None:
    with pytest.raises(UnsupportedTarget, match="cpu by 'llvm', cuda by 'cuda'"):
        target_for(option, "meta", FEATURES)


def test_gpu_target_is_independent_of_the_host_cpu() -> None:
    machines = [target_for("cuda", "cuda", features, (8, 0)) for features in ((), FEATURES)]
    assert str(machines[0]) == str(machines[1])
    cpu, gpu = target_for(None, "cpu", FEATURES), machines[1]
    assert cpu.features == set(FEATURES) and not gpu.features
    assert gpu.requirements == [cpu.requirements[0], "cuda:sm_80"]


@pytest.mark.parametrize("arch", ["80", "sm80", "sm_8", "sm_90b", "compute_80", 80])
def test_unknown_architecture_raises(arch: object) -> None:
    with pytest.raises(OptionError, match=r"unknown architecture .*'sm_80'"):
        check({"kind": "cuda", "arch": arch})


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_100", "sm_120f"])
def test_architectures(arch: str) -> None:
    option = {"kind": "cuda", "arch": arch}
    assert check(option) == option


@pytest.mark.parametrize("mattr", ["+avx2", ["avx2"], [3], 3])
def test_a_list_of_instruction_sets_is_expected(mattr: object) -> None:
    with pytest.raises(OptionError, match=r"mattr is .*avx2.*\+fma"):
        check({"kind": "llvm", "mattr": mattr})
