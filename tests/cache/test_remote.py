from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from tests.cache.entries import KEY, OTHER, artifact
from tests.processes import run_python
from tvmify import TvmifyWarning, tvmify
from tvmify.cache import DiskCache, RemoteCache, TwoLevels, export, import_, packed, remote_at


class Troubled(MemoryFileSystem):
    """An in-memory file system that fails or hangs on request."""

    protocol = "troubled"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    error: ClassVar[dict[str, BaseException]] = {}
    hangs: ClassVar[bool] = False
    asked: ClassVar[list[str]] = []
    begun = threading.Event()
    freed = threading.Event()

    def _trouble(self, what: str) -> None:
        self.asked.append(what)
        if self.hangs:
            self.begun.set()
            self.freed.wait()
        if what in self.error:
            raise self.error[what]

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        self._trouble("read")
        return super().cat_file(path, *args, **kwargs)

    def pipe_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._trouble("write")
        return super().pipe_file(path, *args, **kwargs)


fsspec.register_implementation("troubled", Troubled, clobber=True)


@pytest.fixture
def troubled(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Troubled]]:
    Troubled.begun.clear()
    Troubled.freed.clear()
    monkeypatch.setattr(Troubled, "asked", [])
    monkeypatch.setattr(Troubled, "error", {})
    monkeypatch.setattr(Troubled, "hangs", False)
    Troubled.store.clear()
    yield Troubled
    Troubled.freed.set()


@pytest.fixture(autouse=True)
def _no_remote_yet() -> Iterator[None]:
    remote_at.cache_clear()
    MemoryFileSystem.store.clear()
    yield
    remote_at.cache_clear()


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/shared/folder" if request.param == "file" else "memory://bucket/x"


# --------------------------------------------------------------------------- what comes and goes


def test_an_object_is_an_archive_named_by_the_digest(tmp_path: Path) -> None:
    RemoteCache(f"file://{tmp_path}/shared/").store(KEY, artifact())
    assert [path.name for path in (tmp_path / "shared").iterdir()] == [f"{KEY.digest}.zip"]
    content = (tmp_path / "shared" / f"{KEY.digest}.zip").read_bytes()
    assert packed.unpack(content) == (KEY, artifact())


def test_partial_upload_is_never_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = RemoteCache(f"file://{tmp_path}")
    shared.store(KEY, artifact())

    def full(self: Any, path: str, value: bytes, **_: Any) -> None:
        Path(path).write_bytes(value[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.pipe_file", full)
    with pytest.warns(TvmifyWarning, match="writing failed.*No space left"):
        shared.store(KEY, artifact(b"new"))
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY.digest}.zip"]
    assert shared.load(KEY) == artifact()


# --------------------------------------------------------------------------------- two levels


def test_remote_hit_is_stored_locally(tmp_path: Path, url: str) -> None:
    far = RemoteCache(url)
    levels = TwoLevels(DiskCache(tmp_path / "one"), far)
    assert levels.load(KEY) is None
    levels.store(KEY, artifact())
    assert far.counts == {"misses": 1, "stored": 1}
    far = RemoteCache(url)
    levels = TwoLevels(DiskCache(tmp_path / "two"), far)
    assert levels.load(KEY) == artifact()
    assert levels.load(KEY) == artifact()
    assert far.counts == {"hits": 1}
    assert DiskCache(tmp_path / "one").load(KEY) == artifact()
    assert DiskCache(tmp_path / "two").load(KEY) == artifact()


def test_unusable_remote_entry_is_replaced(tmp_path: Path, url: str) -> None:
    levels = TwoLevels(DiskCache(tmp_path / "one"), RemoteCache(url))
    levels.store(KEY, artifact(b"of no use"))
    with pytest.warns(TvmifyWarning, match="other outputs"):
        levels.reject(KEY, "other outputs")
    levels.store(KEY, artifact(b"new"))
    assert levels.near.load(KEY) == levels.far.load(KEY) == artifact(b"new")


def damage(content: bytes) -> list[bytes]:
    flipped = bytearray(content)
    flipped[content.index(b"code")] ^= 1
    return [b"PK", content[:-30], content[: len(content) // 2], bytes(flipped), b"<html>404</html>"]


@pytest.mark.parametrize("kind", range(5))
def test_a_damaged_object_is_a_miss_and_is_replaced(url: str, kind: int) -> None:
    shared = RemoteCache(url, timeout=30)
    files, root = url_to_fs(url)
    shared.store(KEY, artifact())
    path = f"{root}/{KEY.digest}.zip"
    files.pipe_file(path, damage(files.cat_file(path))[kind])
    with pytest.warns(TvmifyWarning, match="is not used"):
        assert shared.load(KEY) is None
    assert shared.counts == {"stored": 1, "damaged": 1}
    shared.store(KEY, artifact())  # it answers: there is no pause
    assert shared.load(KEY) == artifact()


def test_oversized_entry_is_not_uploaded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvmify.cache.remote._LARGEST", 2000)
    shared = RemoteCache(url)
    with pytest.warns(TvmifyWarning, match="too large"):
        shared.store(KEY, artifact(bytes(2000)))
    assert shared.load(KEY) is None


# ------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("url", ["user:secret@bucket", "user:a@secret@bucket", "bucket?sig=secret"])
def test_a_failing_remote_is_one_warning_and_then_a_pause(
    troubled: type[Troubled], url: str
) -> None:
    url = f"troubled://{url}"
    troubled.error |= {
        "read": RuntimeError(f"no network: {url}"),
        "write": PermissionError("read only"),
    }
    shared = RemoteCache(url)
    with pytest.warns(TvmifyWarning, match="no network") as said:
        for _ in range(5):
            assert shared.load(KEY) is None
            shared.store(KEY, artifact())
    assert len(said) == 1
    assert "secret" not in str(said[0].message)
    assert troubled.asked == ["read", "write"]
    assert shared.counts == {"failed": 2, "skipped": 8}


def test_read_only_remote_is_read(troubled: type[Troubled]) -> None:
    RemoteCache("troubled://bucket").store(KEY, artifact())
    troubled.error["write"] = PermissionError("read only")
    shared = RemoteCache("troubled://bucket")
    with pytest.warns(TvmifyWarning, match="read only"):
        shared.store(OTHER, artifact())
    assert shared.load(KEY) == artifact()


def test_hanging_remote_is_suspended(troubled: type[Troubled]) -> None:
    troubled.hangs = True
    shared = RemoteCache("troubled://bucket", timeout=0, pause=0)
    with pytest.warns(TvmifyWarning, match="no answer in 0 s"):
        assert shared.load(KEY) is None
    assert troubled.begun.wait(10)
    for _ in range(3):  # not even after the pause
        assert shared.load(KEY) is None
    assert troubled.asked == ["read"]
    assert shared.counts == {"failed": 1, "skipped": 3}


@pytest.mark.parametrize("url", ["nonsense://bucket", "s3://", "file:///proc/self/nothing/here"])
def test_unreachable_url_warns(url: str) -> None:
    shared = RemoteCache(url)
    with pytest.warns(TvmifyWarning, match="shared cache"):
        assert shared.load(KEY) is None
        shared.store(KEY, artifact())


def test_local_hits_need_no_fsspec_and_hanging_process_exits(
    tmp_path: Path,
) -> None:
    script = """
import sys, threading, warnings
from pathlib import Path
from tests.cache.entries import KEY, artifact
from tvmify.cache import DiskCache, RemoteCache, TwoLevels

near = DiskCache(Path(sys.argv[1]) / "cache")
near.store(KEY, artifact())
assert TwoLevels(near, RemoteCache("s3://bucket/prefix")).load(KEY) == artifact()
assert "fsspec" not in sys.modules

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

class Hanging(MemoryFileSystem):
    protocol = "hanging"
    def cat_file(self, *args, **kwargs):
        threading.Event().wait()

fsspec.register_implementation("hanging", Hanging)
warnings.simplefilter("ignore")
assert RemoteCache("hanging://bucket", timeout=0).load(KEY) is None
"""
    run_python(script, tmp_path)


def test_forked_process_opens_its_own_remote(troubled: type[Troubled], tmp_path: Path) -> None:
    troubled.hangs = True
    shared = RemoteCache("troubled://bucket", timeout=0, pause=0)
    with pytest.warns(TvmifyWarning, match="no answer"):
        shared.load(KEY)
    assert troubled.begun.wait(10)
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about a fork while threads run
        child = context.Process(target=_load_in_child, args=(shared, tmp_path / "said"))
        child.start()
    child.join(60)
    assert (tmp_path / "said").read_text() == "2 failed"


def _load_in_child(shared: RemoteCache, said: Path) -> None:
    with contextlib.suppress(Exception):
        shared.load(KEY)
    said.write_text(f"{shared.counts['failed']} failed")
    os._exit(0)


# ---------------------------------------------------------------------- a module and its options


class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2


def call(**options: Any) -> Any:
    model = tvmify(Net().eval(), **options)
    x = torch.linspace(-1, 1, 6)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), torch.relu(x) * 2)
    return model.cache_info()


@pytest.fixture
def another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Continue as on another machine: with an empty directory and nothing loaded."""
    from weakref import WeakValueDictionary

    from tvmify.dispatch import load_or_build

    def move() -> None:
        monkeypatch.setenv("TVMIFY_CACHE_DIR", str(tmp_path / "another"))
        monkeypatch.setattr(load_or_build, "_LOADED", WeakValueDictionary())
        remote_at.cache_clear()

    return move


def test_second_machine_builds_nothing(url: str, another_machine: Any, tmp_path: Path) -> None:
    assert call(cache=url).builds == 1
    another_machine()
    info = call(cache=url)
    assert (info.builds, info.disk_hits) == (0, 1)
    assert remote_at(url).counts == {"hits": 1}
    assert len(DiskCache(tmp_path / "another").entries()) == 1


def test_the_environment_names_the_second_level(
    url: str, another_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMIFY_CACHE_URL", url)
    assert call().builds == 1
    another_machine()
    assert call(cache=tmp_path / "third").builds == 0


def test_second_machine_imports_entries(another_machine: Any, tmp_path: Path) -> None:
    assert call().builds == 1
    assert len(export(tmp_path / "programs.zip")) == 1
    another_machine()
    assert len(import_(tmp_path / "programs.zip").stored) == 1
    assert call().builds == 0


@pytest.mark.parametrize("hangs", [False, True])
def test_no_trouble_reaches_a_call(
    troubled: type[Troubled], monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr("tvmify.cache.remote.TIMEOUT", 0.01)
    troubled.hangs = hangs
    troubled.error |= {"read": OSError("no network"), "write": OSError("no network")}
    with pytest.warns(TvmifyWarning, match="shared cache"):
        assert call(cache="troubled://bucket").builds == 1
