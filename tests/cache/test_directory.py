from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cache.programs import artifact_of, key_of
from tvmify import TvmifyWarning
from tvmify.cache import DiskCache, directory
from tvmify.errors import CacheError

NOBODY = 54321  # a user id without a user


def open_to_others(place: Path) -> None:
    place.mkdir(mode=0o700)
    place.chmod(0o705)


def open_to_a_group(place: Path) -> None:
    place.mkdir(mode=0o700)
    place.chmod(0o720)


def link(place: Path) -> None:
    (place.parent / "other").mkdir(mode=0o700)
    place.symlink_to(place.parent / "other")


def link_to_nowhere(place: Path) -> None:
    place.symlink_to(place.parent / "other")


def circle(place: Path) -> None:
    place.symlink_to(place)


def below_a_circle(place: Path) -> None:
    place.parent.rmdir()
    place.parent.symlink_to(place.parent)


def file(place: Path) -> None:
    place.touch(mode=0o600)


def pipe(place: Path) -> None:
    os.mkfifo(place, 0o600)


def in_an_open_parent(place: Path) -> None:
    place.mkdir(mode=0o700)
    place.parent.chmod(0o777)


def behind_a_link_in_an_open_parent(place: Path) -> None:
    (place.parent / "open").mkdir()
    (place.parent / "open").chmod(0o777)
    (place.parent / "open" / "real").mkdir(mode=0o700)
    place.symlink_to(place.parent / "open" / "real")


@pytest.mark.parametrize("place", ["/dev/null", "/dev/null/cache"])
def test_device_file_advice_does_not_suggest_removal(place: str) -> None:
    with pytest.warns(TvmifyWarning, match="(?i)not a directory.*cache=False") as warned:
        DiskCache(Path(place)).store(key_of(0), artifact_of(0))
    assert "Remove" not in str(warned[0].message)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (open_to_others, "chmod 700"),
        (open_to_a_group, "chmod 700"),
        (link, "symbolic link.*other"),
        (link_to_nowhere, "symbolic link"),
        (circle, "symbolic link"),
        (below_a_circle, "symbolic link"),
        (file, "is a file, not a directory.*cache=False"),
        (pipe, "is a pipe, not a directory"),
        (in_an_open_parent, "chmod go-w"),
        (behind_a_link_in_an_open_parent, "symbolic link|chmod go-w"),
    ],
)
def test_a_directory_that_is_not_private_is_not_used(
    tmp_path: Path, make: Callable[[Path], None], said: str
) -> None:
    (tmp_path / "parent").mkdir(mode=0o700)
    place = tmp_path / "parent" / "cache"
    make(place)
    before = sorted(tmp_path.rglob("*"))
    cache = DiskCache(place)
    with pytest.warns(TvmifyWarning, match=said) as warned:
        assert cache.load(key_of(0)) is None
        cache.store(key_of(0), artifact_of(0))
        assert cache.load(key_of(0)) is None
    assert len(warned) == 1
    with cache.building(key_of(0).digest, 0) as is_mine:
        assert not is_mine
    with pytest.raises(CacheError, match=said):
        cache.entries()
    assert sorted(tmp_path.rglob("*")) == before


def owned_by_another(place: Path, mode: int) -> Path:
    place.mkdir()
    os.chown(place, NOBODY, NOBODY)
    place.chmod(mode)
    return place / "cache"


def behind_a_link(place: Path, owner: int) -> Path:
    """Return a path through a link in a directory like /tmp."""
    (place / "tmp").mkdir(parents=True)
    (place / "tmp").chmod(0o1777)
    (place / "real").mkdir(mode=0o700)
    (place / "tmp" / "link").symlink_to(place / "real")
    os.lchown(place / "tmp" / "link", owner, owner)
    return place / "tmp" / "link" / "cache"


def behind_two_links(place: Path, mode: int) -> Path:
    """Return a path whose first link leads through a second one."""
    for name in ("open", "real", "mine"):
        (place / name).mkdir(parents=True, mode=0o700)
    (place / "open").chmod(mode)
    (place / "open" / "second").symlink_to("../real")
    (place / "mine" / "first").symlink_to(place / "mine" / ".." / "open" / "second")
    return place / "mine" / "first" / "deeper" / "cache"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
@pytest.mark.parametrize(
    "make",
    [
        lambda place: owned_by_another(place, 0o755),
        lambda place: owned_by_another(place, 0o1777),
        lambda place: behind_a_link(place, NOBODY),
        lambda place: behind_two_links(place, 0o777),
    ],
)
def test_no_part_of_the_way_may_be_replaced_by_others(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    place = make(tmp_path / "place")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CacheError, match="may replace what is in"):
        directory.ensure(place)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "make", [lambda place: behind_a_link(place, os.geteuid()), lambda p: behind_two_links(p, 0o755)]
)
def test_links_of_our_own_may_lead_there(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    place = make(tmp_path / "place")
    directory.ensure(place)
    assert directory.is_there(place)
    assert (tmp_path / "place" / "real").resolve() in place.resolve().parents


def test_a_parent_like_tmp_serves(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    cache = DiskCache(tmp_path / "tmp" / "cache")
    cache.store(key_of(0), artifact_of(0))
    assert cache.load(key_of(0)) == artifact_of(0)


def test_a_parent_may_be_a_link_of_our_own(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    cache = DiskCache(tmp_path / "home" / "cache")
    cache.store(key_of(0), artifact_of(0))
    assert cache.load(key_of(0)) == artifact_of(0)


def test_parents_are_created_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        DiskCache(tmp_path / "a" / "b" / "cache").store(key_of(0), artifact_of(0))
    finally:
        os.umask(before)
    for place in (tmp_path / "a").rglob("*"):
        assert stat.S_IMODE(place.lstat().st_mode) == (0o700 if place.is_dir() else 0o600)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_directory_of_another_user_is_not_used(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache")
    cache.store(key_of(0), artifact_of(0))
    entry = tmp_path / "cache" / key_of(0).digest
    for path in (entry, entry / "module.so", entry / "manifest.json"):
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(CacheError, match="written to by others"):
            cache.read(entry.name)
        os.chown(path, 0, 0)
    os.chown(tmp_path / "cache", NOBODY, NOBODY)
    with pytest.raises(CacheError, match=f"belongs to user {NOBODY}"):
        cache.entries()


def as_nobody(script: str, *arguments: object) -> str:
    """Run a script as a user without a name, a home and rights; return its warnings."""
    # Modules are imported beforehand, since this user may not read the library.
    code = f"""
import os, pwd, sys, tempfile, warnings
from pathlib import Path
from tests.cache.programs import artifact_of, key_of
from tvmify.cache import DiskCache, directory
from tvmify.options import CompileOptions
with tempfile.TemporaryDirectory() as place:
    cache = DiskCache(Path(place) / "cache")
    with cache.building(key_of(0).digest, 1): cache.store(key_of(0), artifact_of(0))
warnings.simplefilter("always")
if os.geteuid() == 0: os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
for name in ("HOME", "XDG_CACHE_HOME", "TVMIFY_CACHE_DIR"): os.environ.pop(name, None)
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code + script, *map(str, arguments)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_unwritable_directory_falls_back_to_memory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    script = """
cache = DiskCache(Path(sys.argv[1]))
assert cache.load(key_of(0)) is None
cache.store(key_of(0), artifact_of(0))
cache.store(key_of(1), artifact_of(1))
with cache.building(key_of(0).digest, 1) as is_mine: assert not is_mine
"""
    assert as_nobody(script, tmp_path / "cache").count("TvmifyWarning:") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without a name")
def test_missing_home_falls_back_to_memory() -> None:
    said = as_nobody("""
assert CompileOptions.of({}).cache_directory() is None
assert CompileOptions.of({"cache": "~/cache"}).cache_directory() is None
assert CompileOptions.of({"cache": "/tmp/cache"}).cache_directory() == Path("/tmp/cache")
""")
    assert "no home" in said
    assert "Set TVMIFY_CACHE_DIR" in said


def test_full_disk_warns_once_and_leaves_no_files(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.store(key_of(0), artifact_of(0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.warns(TvmifyWarning, match="in memory only.*large") as warned:
            cache.store(key_of(1), artifact_of(1))
            cache.store(key_of(2), artifact_of(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(warned) == 1
    assert cache.load(key_of(0)) == artifact_of(0)
    assert [path.name for path in tmp_path.iterdir()] == [key_of(0).digest]


@pytest.mark.parametrize("name", ["mkdir", "rename", "fsync", "open"])
@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failing_disk_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    cache = DiskCache(tmp_path)
    cache.store(key_of(0), artifact_of(0))

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, pytest.warns(TvmifyWarning) as warned:
        patch.setattr(os, name, fail)
        if name == "rename":  # in Python 3.10, paths keep the function
            patch.setattr(Path, name, fail)
        cache.store(key_of(1), artifact_of(1))
        cache.store(key_of(2), artifact_of(2))
    assert len(warned) == 1
    assert cache.load(key_of(0)) == artifact_of(0)
    cache.store(key_of(1), artifact_of(1))
    assert cache.load(key_of(1)) == artifact_of(1)
