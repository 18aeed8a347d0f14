"""Programs built without a GPU serve all drivers, but verdicts belong to one driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tvmify import TvmifyWarning, tvmify
from tvmify.cache import DiskCache, Key
from tvmify.dispatch import keys, load_or_build
from tvmify.dispatch.attempt import Attempt
from tvmify.dispatch.programs import Source

pytestmark = pytest.mark.usefixtures("inference")


class Machine:
    """A fake machine, on which code for the CPU counts as code for a GPU with a given driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver: str | None = None
        self.verdicts: list[tuple[float, float]] = []
        of_cpu = keys.key

        def key(*args: Any, **kwargs: Any) -> Key:
            gpu = None if self.driver is None else torch.device("cuda:0")
            return Key({**of_cpu(*args, **kwargs).entries, "cuda": keys._cuda_text(gpu)})

        monkeypatch.setattr(keys, "key", key)
        monkeypatch.setattr(keys, "_driver_version", lambda: self.driver)
        monkeypatch.setattr("tvmify.dispatch.verdict.compare", lambda *_: self.verdicts.pop())
        monkeypatch.delenv("TVMIFY_COMPARE", raising=False)

    def call(self, driver: str | None, *verdicts: tuple[float, float], compare: bool = True) -> Any:
        """Call a module on a machine; return what tvmify did."""
        load_or_build._LOADED.clear()
        self.driver, self.verdicts = driver, [*verdicts]
        torch.manual_seed(0)
        net, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
        fast = tvmify(net, compare=compare)
        torch.testing.assert_close(fast(x), net(x))
        assert not self.verdicts
        return fast.cache_info()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose calls can be compared; at first it has no GPU."""
    return Machine(monkeypatch)


def test_cache_filled_without_gpu_is_used(machine: Machine, cache_directory: Path):
    assert machine.call(None, compare=False).builds == 1
    for driver in ("12.8", "13.0"):
        info = machine.call(driver, compare=False)
        assert (info.builds, info.disk_hits) == (0, 1)
    assert len(DiskCache(cache_directory).entries()) == 1


def test_verdicts_are_per_driver(machine: Machine, cache_directory: Path):
    machine.call(None, compare=False)
    assert machine.call("12.8", (2, 1)).entries == 0  # eager was faster
    assert machine.call("12.8").entries == 0
    assert machine.call("13.0", (1, 2)).entries == 1
    assert machine.call("13.0").entries == 1
    known = {}
    for stored in DiskCache(cache_directory).entries():
        manifest, library = DiskCache(cache_directory).read(stored.digest)
        driver = manifest.key.entries["cuda"].partition("driver: ")[2]
        known[driver] = list(manifest.artifact_of(library).verdicts.values())
    assert known == {"any": [], "12.8": [(2, 1)], "13.0": [(1, 2)]}


def test_gpu_build_is_tied_to_its_driver(machine: Machine):
    assert machine.call("12.8", compare=False).builds == 1
    assert machine.call("13.0", compare=False).builds == 1
    assert machine.call(None, compare=False).builds == 1
    assert machine.call("12.8", compare=False).disk_hits == 1


def test_unrunnable_code_is_rebuilt_for_this_driver(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("TVMIFY_CACHE_URL", (tmp_path / "shared").as_uri())
    machine.call(None, compare=False)
    start = Attempt._start

    def fails_if_loaded(self: Attempt, *arguments: Any) -> Any:
        if self._facts.source is Source.LOADED:
            raise RuntimeError("no kernel image")
        return start(self, *arguments)

    monkeypatch.setattr(Attempt, "_start", fails_if_loaded)
    with pytest.warns(TvmifyWarning, match="built again: no kernel image"):
        assert machine.call("13.0", compare=False).builds == 1
    monkeypatch.setattr(Attempt, "_start", start)
    info = machine.call("13.0", compare=False)
    assert (info.builds, info.disk_hits) == (0, 1)
