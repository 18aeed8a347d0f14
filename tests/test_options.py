from __future__ import annotations

import re
from pathlib import Path

import platformdirs
import pytest
import torch

from tvmify import OptionError
from tvmify.options import CompileOptions


def test_defaults_follow_the_inputs_and_the_user_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TVMIFY_CACHE_DIR")
    options = CompileOptions.of({})
    assert options.target is None
    assert not options.strict
    assert options.cache_directory() == Path(platformdirs.user_cache_dir("tvmify"))


def test_environment_moves_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMIFY_CACHE_DIR", "/somewhere")
    assert CompileOptions.of({}).cache_directory() == Path("/somewhere")
    assert CompileOptions.of({"cache": "/elsewhere"}).cache_directory() == Path("/elsewhere")
    assert CompileOptions.of({"cache": False}).cache_directory() is None


def test_url_is_a_shared_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMIFY_CACHE_DIR", "/somewhere")
    options = CompileOptions.of({"cache": "s3://bucket/prefix"})
    assert options.cache_directory() == Path("/somewhere")
    assert options.cache_url() == "s3://bucket/prefix"
    assert CompileOptions.of({}).cache_url() is None
    monkeypatch.setenv("TVMIFY_CACHE_URL", "file:///shared")
    assert options.cache_url() == "s3://bucket/prefix"
    assert CompileOptions.of({}).cache_url() == "file:///shared"
    assert CompileOptions.of({"cache": "/elsewhere"}).cache_url() == "file:///shared"
    assert CompileOptions.of({"cache": False}).cache_url() is None


@pytest.mark.parametrize("cache", [Path("s3://bucket/prefix"), "file:/shared"])
def test_incomplete_url_is_refused(cache: object) -> None:
    with pytest.raises(OptionError, match="as a string with '://'"):
        CompileOptions.of({"cache": cache})


def test_unknown_option_names_the_valid_ones() -> None:
    with pytest.raises(
        OptionError, match=r"'targt': choose from target, .*strict, .*mean 'target'"
    ):
        CompileOptions.of({"targt": "llvm"})


@pytest.mark.parametrize("target", ["lvm", "x86", {"mcpu": "znver4"}, {"kind": "vulkan"}, 3])
def test_unknown_target_names_the_valid_ones(target: object) -> None:
    with pytest.raises(ValueError, match="'llvm', 'cuda'"):
        CompileOptions.of({"target": target})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strict", 1),
        ("cuda_graph", 1),
        ("cache", 7),
        ("cache", ""),
        ("cache_size", 0),
        ("cache_size", True),
        ("progress", "yes"),
    ],
)
def test_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"{name}.*{value!r}"):
        CompileOptions.of({name: value})


@pytest.mark.parametrize(
    ("device", "target"),
    [
        ("cpu", "llvm"),
        (torch.device("cpu"), "llvm"),
        (torch.device("cuda"), "cuda"),
        (torch.device("cuda", 1), "cuda"),
        ("cuda:0", "cuda"),
    ],
)
def test_a_device_or_its_name_is_understood_as_target(device: object, target: str) -> None:
    assert CompileOptions.of({"target": device}) == CompileOptions(target=target)


def test_unsupported_device_is_refused() -> None:
    with pytest.raises(OptionError, match=r"unknown target device\(type='meta'\): choose one"):
        CompileOptions(target=torch.device("meta"))


def test_the_name_of_a_device_is_understood_as_kind() -> None:
    described = {"kind": "cpu", "mcpu": "znver4"}
    assert CompileOptions(target=described).target == {"kind": "llvm", "mcpu": "znver4"}
    assert described["kind"] == "cpu"


def test_tuning_may_be_a_flag() -> None:
    assert CompileOptions(tune=True) == CompileOptions(tune="quick")
    assert CompileOptions(tune=True).key_text() == CompileOptions(tune="quick").key_text()
    assert CompileOptions(tune=False) == CompileOptions()


def test_modes_of_torch_compile() -> None:
    assert CompileOptions.of({"mode": None}) == CompileOptions.of({"mode": "default"})
    assert CompileOptions.of({"mode": "max-autotune"}) == CompileOptions(
        tune="quick", cuda_graph=True
    )
    chosen = CompileOptions.of({"mode": "max-autotune", "cuda_graph": False})
    assert chosen == CompileOptions(tune="quick")
    for mode in ("fast", 3, ["default"]):
        with pytest.raises(OptionError, match="expected one of default, reduce-overhead"):
            CompileOptions.of({"mode": mode})


@pytest.mark.parametrize(("name", "meant"), [("device", "target"), ("tuning", "tune")])
def test_suggestion_for_a_misspelt_option(name: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"did you mean '{meant}'"):
        CompileOptions.of({name: "cpu"})


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("fullgraph", True, "write strict=True"),
        ("backend", "inductor", 'torch.compile(model, backend="tvmify")'),
        ("options", {"strict": True}, "as keywords"),
        ("disable", True, "TVMIFY_DISABLE=1"),
    ],
)
def test_other_arguments_of_torch_compile(name: str, value: object, advice: str) -> None:
    message = f"{name!r} belongs to torch.compile.*{re.escape(advice)}"
    with pytest.raises(OptionError, match=message):
        CompileOptions.of({name: value})
