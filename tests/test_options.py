from __future__ import annotations

import re
from pathlib import Path

import platformdirs
import pytest

from tvmify import OptionError, options
from tvmify.options import CompileOptions, disabled


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


def test_a_url_is_the_level_behind_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_half_a_url_is_no_directory(cache: object) -> None:
    with pytest.raises(OptionError, match="as a text with '://'"):
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
        ("cache_size", 0),
        ("cache_size", True),
        ("progress", "yes"),
    ],
)
def test_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"{name}.*{value!r}"):
        CompileOptions.of({name: value})


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_disabled_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    monkeypatch.setenv("TVMIFY_DISABLE", value)
    assert disabled() is expected


def test_every_variable_that_is_read_is_named() -> None:
    source = Path(options.__file__).read_text("utf-8")
    assert set(re.findall(r"TVMIFY_[A-Z_]+", source)) == set(options.VARIABLES)


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", (10**10, None)),
        ("20GB", (20 * 10**9, None)),
        ("1.5 gib", (3 << 29, None)),
        ("500 entries", (None, 500)),
        ("1 entry, 7 B", (7, 1)),
        ("0 B", (0, None)),
    ],
)
def test_the_size_of_the_cache_is_bytes_or_entries(
    monkeypatch: pytest.MonkeyPatch, text: str, limits: tuple[int | None, int | None]
) -> None:
    monkeypatch.setenv("TVMIFY_CACHE_SIZE", text)
    assert CompileOptions.of({}).cache_limits() == limits


@pytest.mark.parametrize("text", ["much", "20 XB", "-1 GB", "1e3", "5 GB and more", ","])
def test_another_size_of_the_cache_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TVMIFY_CACHE_SIZE", text)
    with pytest.raises(OptionError, match=f"TVMIFY_CACHE_SIZE is '{text}'.*500 entries"):
        CompileOptions.of({}).cache_limits()


def test_the_name_of_a_device_is_understood_as_target() -> None:
    assert CompileOptions(target="cpu") == CompileOptions(target="llvm")
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
    with pytest.raises(OptionError, match=f"{name!r} is one of torch.compile.*{re.escape(advice)}"):
        CompileOptions.of({name: value})
