from __future__ import annotations

import copy
import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cache.programs import artifact_of, key_of
from tvmify import TvmifyWarning, tvmify
from tvmify.artifact import Artifact
from tvmify.cache import ANY_TORCH, DiskCache, Key
from tvmify.dispatch import load_or_build
from tvmify.options import CompileOptions

KEY = key_of(0)


def only_entry(disk: DiskCache) -> tuple[Key, Artifact]:
    (stored,) = disk.entries()
    manifest, content = disk.read(stored.digest)
    return manifest.key, manifest.artifact_of(content)


@pytest.mark.parametrize("library", [b"", b"no library"])
def test_unloadable_code_is_rebuilt(
    cache_directory: Path, monkeypatch: pytest.MonkeyPatch, inference: None, library: bytes
) -> None:
    net, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    expected = tvmify(copy.deepcopy(net), target="llvm")(x)
    disk = DiskCache(cache_directory)
    key, artifact = only_entry(disk)
    artifact = dataclasses.replace(artifact, library=library)
    disk.clear()
    disk.store(key, artifact)
    load_or_build._LOADED.clear()
    again = tvmify(copy.deepcopy(net), target="llvm")
    with pytest.warns(TvmifyWarning, match="built again"):
        assert torch.equal(again(x), expected)
    assert again.cache_info().builds == 1
    assert len(disk.entries()) == 1


def test_out_of_gpu_memory_does_not_reject_the_program(tmp_path: Path) -> None:
    disk, options = DiskCache(tmp_path), CompileOptions(cache=tmp_path)
    disk.store(KEY, artifact_of(0))
    full = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        load_or_build.reject(KEY, artifact_of(0), full, options)
    assert disk.load(KEY) == artifact_of(0)
    with pytest.warns(TvmifyWarning, match="other outputs"):
        load_or_build.reject(KEY, artifact_of(0), RuntimeError("other outputs"), options)
    assert disk.load(KEY) is None


@pytest.mark.parametrize("repaired", [True, False])
def test_after_a_rejection_only_other_code_is_loaded(
    cache_directory: Path, inference: None, repaired: bool
) -> None:
    net, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    expected = tvmify(copy.deepcopy(net), target="llvm")(x)
    disk = DiskCache(cache_directory)
    key, artifact = only_entry(disk)
    with pytest.warns(TvmifyWarning, match="it failed"):
        load_or_build.reject(key, artifact, RuntimeError("it failed"), CompileOptions.of({}))
    # A remote cache may still serve it, or another process may have built it again.
    other = dataclasses.replace(artifact, library=artifact.library + b"\0")
    disk.store(key, other if repaired else artifact)
    again = tvmify(copy.deepcopy(net), target="llvm")
    assert torch.equal(again(x), expected)
    assert again.cache_info().builds == (0 if repaired else 1)
    load_or_build._LOADED.clear()
    once_more = tvmify(copy.deepcopy(net), target="llvm")
    assert torch.equal(once_more(x), expected)
    assert once_more.cache_info().builds == 0


class Cholesky(nn.Module):
    """Has a result that PyTorch computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x @ x.T + torch.eye(2)) + 1


@pytest.mark.parametrize(("net", "version"), [(nn.Linear(4, 4), ANY_TORCH), (Cholesky(), None)])
def test_other_pytorch_version_finds_independent_code(
    cache_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    inference: None,
    net: nn.Module,
    version: str | None,
) -> None:
    x = torch.randn(2, 4)
    expected = tvmify(copy.deepcopy(net.eval()), target="llvm")(x)
    key, _ = only_entry(DiskCache(cache_directory))
    assert key.entries["torch"] == (version or torch.__version__)
    load_or_build._LOADED.clear()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    again = tvmify(copy.deepcopy(net), target="llvm")
    assert torch.equal(again(x), expected)
    assert again.cache_info().builds == (0 if version else 1)


def test_hit_does_not_wait_for_a_build(inference: None) -> None:
    net, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    expected = tvmify(copy.deepcopy(net), target="llvm")(x)
    load_or_build._LOADED.clear()
    found = []

    def call() -> None:
        with torch.inference_mode():
            found.append(tvmify(copy.deepcopy(net), target="llvm")(x))

    with load_or_build._BUILDING:  # as this thread does while it builds something else
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(60)
    assert torch.equal(found[0], expected)
