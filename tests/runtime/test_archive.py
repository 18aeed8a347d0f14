"""Damaged and forged files, and files of other kinds: each gives a clear error and no more."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tvmify
from tests.processes import run_python
from tests.runtime import mutants
from tests.runtime.mutants import MANIFEST, Records
from tvmify import ArchiveError
from tvmify.runtime import manifest
from tvmify.system.zip_records import AmbiguousArchive

X = torch.ones(1, 3, 8, 8)
Z = torch.ones(3, 4, dtype=torch.complex64)
# The number for ordinary runs; `make fuzz` tries more.
MUTANTS = int(os.environ.get("TVMIFY_MUTANTS", "1000"))


@pytest.fixture
def changed(small: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write the records of the small model, changed, to another file."""

    def write(change: Callable[[Records], Any], forged: bool = True) -> Path:
        contents = mutants.records(small.read_bytes())
        change(contents)
        path = tmp_path / "changed.pt"
        path.write_bytes(mutants.archive(contents, forged))
        return path

    return write


def mapped_code() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:tvmify")


# ---------------------------------------------------------------------------------------- chance


@pytest.mark.parametrize(
    ("kind", "share", "expected"),
    [
        ("damaged", 1, {"right", "ArchiveError"}),
        # A forger can make it another model, but nothing else.
        ("forged", 4, {"right", "wrong", "ArchiveError", "RuntimeError", "UnicodeDecodeError"}),
    ],
)
def test_no_change_of_a_file_ends_the_process(small, kind, share, expected):
    found = mutants.hunt(small, kind, range(MUTANTS // share))
    assert found.total() == MUTANTS // share
    assert {outcome.partition(" at seed")[0] for outcome in found} <= expected, found
    assert found["ArchiveError"] > MUTANTS // share / 2


# ------------------------------------------------------------------------------- what is no archive


def test_non_files_are_refused(small, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello" * 1000)
    for name, reason in {
        "pipe": "not a regular file",
        ".": "not a regular file",
        "empty": "not a complete archive",
        "text": "not a complete archive",
    }.items():
        for read in (tvmify.load, tvmify.inspect):
            with pytest.raises(ArchiveError, match=reason):
                read(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        tvmify.load(tmp_path / "nothing")


def test_foreign_archives_are_refused(tmp_path):
    path = tmp_path / "other.pt"
    with zipfile.ZipFile(path, "w"):
        pass
    with pytest.raises(ArchiveError, match="not a TorchScript archive"):
        tvmify.load(path)
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), str(path))
    with pytest.raises(ArchiveError, match="no manifest"):
        tvmify.load(path)


# ------------------------------------------------------------------------------- records and layout


def rename(old: str, new: str) -> Callable[[Records], None]:
    return lambda contents: contents.__setitem__(new, contents.pop(old))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.pop("archive/data/0"), "records are not those .*data/0"),
        (lambda c: c.update({"archive/more": b""}), "records are not those .*more"),
        (lambda c: c.update({"archive/../../x": b"x"}), r"records are not those .*\.\./\.\./x"),
        (lambda c: c.update({"/x": b"x"}), "not a TorchScript archive"),
        (lambda c: c.update({"../x": b"x"}), "not a TorchScript archive"),
        (lambda c: c.update({"archive/data/0": bytes(432)}), "data/0 is damaged"),
        (rename("archive/data/0", "archive/data/9"), "records are not those"),
        (lambda c: c.pop("archive/data.pkl"), "records are not those .*data.pkl"),
    ],
)
def test_changed_records_are_named(changed, tmp_path, change, reason):
    path = changed(change, forged=False)
    with pytest.raises(ArchiveError, match=reason):
        tvmify.load(path)
    assert [*tmp_path.iterdir()] == [path]


def test_record_names_cannot_escape_the_folder(changed, tmp_path):
    path = changed(lambda c: c.update({"archive/../../x": b"x", "archive//tmp/x": b"x"}))
    tvmify.load(path)(X)
    assert [*tmp_path.iterdir()] == [path]
    assert not (tmp_path.parent / "x").exists()


def test_duplicate_records_are_refused(small, tmp_path):
    path = shutil.copy(small, tmp_path)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as file:
        file.writestr("archive/data.pkl", b"")
    with pytest.raises(ArchiveError, match="two records of one name"):
        tvmify.load(path)


def test_something_in_front_of_the_archive_or_behind_it(small, tmp_path):
    path = tmp_path / "model.pt"
    for data in (b"MZ" + small.read_bytes(), small.read_bytes() + b"PK"):
        path.write_bytes(data)
        with pytest.raises(ArchiveError, match="not a complete archive"):
            tvmify.load(path)


def test_readers_cannot_be_shown_two_directories(small, tmp_path):
    # zipfile reads the directory right before the end, PyTorch the one that the end points to.
    data = small.read_bytes()
    other = mutants.archive(mutants.records(data) | {"archive/data/0": bytes(432)}, forged=False)
    end = data[-22:]
    path = tmp_path / "model.pt"
    path.write_bytes(other[:-22] + data[:-22] + end[:16] + other[-6:-2] + end[20:])
    with pytest.raises(ArchiveError, match="directory is not where"):
        tvmify.load(path)


def test_a_record_cannot_claim_to_be_huge(changed, small, tmp_path, monkeypatch):
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w") as file:
        for name, record in mutants.records(small.read_bytes()).items():
            file.writestr(name, record)
        file.writestr("archive/code/bomb.py", bytes(300 << 20), zipfile.ZIP_DEFLATED)
    path = tmp_path / "bomb.pt"
    path.write_bytes(bomb.getvalue())
    assert path.stat().st_size < 1 << 20
    monkeypatch.setattr(manifest, "_sha256", lambda *_: pytest.fail("it was expanded"))
    with pytest.raises(ArchiveError, match="expand to more than"):
        tvmify.load(path)


# ---------------------------------------------------------------------------------------- manifests


def in_manifest(**fields: Any) -> Callable[[Records], None]:
    def change(contents: Records) -> None:
        document = json.loads(contents[MANIFEST]) | fields
        contents[MANIFEST] = json.dumps(document).encode()

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (in_manifest(format=99), "format 99, and this version of tvmify reads 1"),
        (in_manifest(signatures=7), "manifest cannot be read"),
        (in_manifest(signatures=[{"arguments": 1, "needs": [], "bytes": 1}]), "signatures"),
        (in_manifest(signatures=[{}]), "manifest cannot be read"),
        (in_manifest(model=1), "invalid value for 'model'"),
        (in_manifest(records=[]), "invalid value for 'records'"),
        (in_manifest(records={"archive/version": "x"}), "records are not those"),
        (lambda c: c.update({MANIFEST: b"\xff{"}), "manifest cannot be read"),
        (lambda c: c.update({MANIFEST: b"[" * 100_000}), "manifest cannot be read"),
        (lambda c: c.update({MANIFEST: b"[]"}), "manifest cannot be read"),
        (lambda c: c.update({MANIFEST: b"1" * 100_000}), "manifest cannot be read"),
    ],
)
def test_wrong_manifests_are_refused(changed, change, reason):
    path = changed(change, forged=False)
    for read in (tvmify.load, tvmify.inspect):
        with pytest.raises(ArchiveError, match=reason):
            read(path)


# ------------------------------------------------------------------------------------- native state


def in_pickle(old: bytes, new: bytes) -> Callable[[Records], None]:
    def change(contents: Records) -> None:
        pickled = contents["archive/data.pkl"]
        assert old in pickled
        contents["archive/data.pkl"] = pickled.replace(old, new, 1)

    return change


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


@pytest.mark.parametrize("part", ["fallbacks", "strict", "state", "arguments", "packings 0"])
def test_native_state_lacks_a_part(changed, part):
    path = changed(in_pickle(text(part), text(part + "?")))
    with pytest.raises(ArchiveError, match=f"it lacks '{part}'"):
        tvmify.load(path)


@pytest.mark.parametrize("part", ["inputs", "weights", "outputs", "forms"])
def test_native_state_lacks_numbers(changed, part):
    path = changed(in_pickle(text(part) + b"q", text(part + "?") + b"q"))
    with pytest.raises(ArchiveError, match=f"it lacks '{part}'|Unknown|cannot be loaded"):
        tvmify.load(path)


def test_code_without_a_digest_is_not_loaded(changed):
    path = changed(in_pickle(text("sha1"), text("sha0")))
    with pytest.raises(ArchiveError, match="has no digest"):
        tvmify.load(path)


@pytest.fixture(scope="module")
def of_complex_numbers(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """The records of a saved function with three results; the first two are complex."""
    path = tmp_path_factory.mktemp("complex") / "model.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVMIFY_CACHE_DIR", str(path.parent / "cache"))
        patch.setenv("TVMIFY_COMPARE", "0")
        tvmify.save(lambda z: (z * z, z + 1j, z.real + 1), path, example_inputs=Z)
    return mutants.records(path.read_bytes())


@pytest.mark.parametrize(
    ("indices", "reason"),
    [
        ("0 x", "complex results '0 x', which are no indices"),
        ("99999999999999999999", "no indices"),
        ("-1", "3 results, and result -1 is to be complex"),
        ("0 3", "3 results, and result 3 is to be complex"),
        ("4611686018427387904", "3 results, and result 4611686018427387904 is"),
        ("0 2", "a result of dtype float and shape .3, 4. does not hold pairs"),
    ],
)
def test_forged_complex_results_are_refused(of_complex_numbers, tmp_path, indices, reason):
    contents = dict(of_complex_numbers)
    in_pickle(text("0 1"), text(indices))(contents)
    path = tmp_path / "forged.pt"
    path.write_bytes(mutants.archive(contents))
    with pytest.raises((ArchiveError, RuntimeError, IndexError), match=reason):
        tvmify.load(path)(Z)


def test_tampered_code_is_never_mapped(changed, small):
    name, code = max(mutants.records(small.read_bytes()).items(), key=lambda item: len(item[1]))
    path = changed(lambda c: c.update({name: code[:-1] + bytes([code[-1] ^ 1])}))
    before = mapped_code()
    for load in (tvmify.load, torch.jit.load):
        module = load(path)
        with pytest.raises(RuntimeError, match=r"compiled code of \d+ bytes is damaged"):
            module(X)
        assert mapped_code() == before


def test_code_is_mapped_with_the_first_call(small):
    module = tvmify.load(small)
    before = mapped_code()
    module(X)
    assert mapped_code() > before


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("apache-tvm==", "apache-tvm=?", "it was built for apache-tvm=?"),
        ("x86_64 ", "z80 ", "this CPU does not have z80"),
    ],
)
def test_code_for_something_else_is_not_used(changed, small, tmp_path, old, new, reason):
    def change(contents: Records) -> None:
        pickled = contents["archive/data.pkl"]
        at = pickled.index(old.encode())
        size = int.from_bytes(pickled[at - 4 : at], "little") + len(new) - len(old)
        rest = pickled[at + len(old) :]
        contents["archive/data.pkl"] = (
            pickled[: at - 4] + size.to_bytes(4, "little") + new.encode() + rest
        )

    if old.encode() not in mutants.records(small.read_bytes())["archive/data.pkl"]:
        pytest.skip("not on this machine")
    module = tvmify.load(changed(change))
    before = mapped_code()
    with pytest.warns(UserWarning, match=reason):
        y = module(X)
    torch.testing.assert_close(y, tvmify.load(small)(X))
    with pytest.raises(RuntimeError, match=reason):
        module._tvmify.set_strict(True)
        module(X)
    # It stays the same when it is saved again.
    module._tvmify.set_strict(False)
    torch.jit.save(module, str(tmp_path / "again.pt"))
    again = torch.jit.load(str(tmp_path / "again.pt"))
    assert reason in again._tvmify.explain()[0]
    assert mapped_code() == before


def test_without_memfd_code_lies_in_a_private_directory_for_a_moment(small, tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    shim = tmp_path / "shim.c"
    shim.write_text(
        """
        #include <errno.h>
        int memfd_create(const char* name, unsigned flags) { errno = ENOSYS; return -1; }
        """
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "shim.so", shim], check=True)
    places = tmp_path / "tmp"
    places.mkdir()
    script = """
        import sys, torch, tvmify
        module = tvmify.load(sys.argv[1])
        y = module(torch.ones(1, 3, 8, 8))
        maps = [line for line in open("/proc/self/maps") if sys.argv[2] in line]
        assert maps and all("(deleted)" in line for line in maps), maps
        print(y.sum().item())
    """
    # After other preloaded libraries, since a sanitizer has to be the first.
    preloaded = f"{os.environ.get('LD_PRELOAD', '')} {tmp_path / 'shim.so'}"
    child = run_python(script, small, places, LD_PRELOAD=preloaded, TMPDIR=str(places))
    assert float(child.stdout) == pytest.approx(tvmify.load(small)(X).sum().item())
    assert not [*places.iterdir()]


def of_format_99(name: bytes) -> Callable[[Records], None]:
    def change(contents: Records) -> None:
        pickled = contents["archive/data.pkl"]
        at = pickled.index(b"K\x01", pickled.index(name))
        contents["archive/data.pkl"] = pickled[:at] + b"K\x63" + pickled[at + 2 :]

    return change


@pytest.mark.parametrize("name", [b"SavedModule\n", b"CompiledModule\n"])
def test_state_of_another_format_is_not_used(changed, small, tmp_path, name):
    module = tvmify.load(changed(of_format_99(name)))
    with pytest.warns(
        UserWarning, match=r"saved in format 99, and this version of tvmify reads \d"
    ):
        y = module(X)
    torch.testing.assert_close(y, tvmify.load(small)(X))
    # It keeps the setting that only compiled code may run.
    strict = tvmify.load(changed(of_format_99(name)), strict=True)
    with pytest.raises(RuntimeError, match="saved in format 99"):
        strict(X)
    with pytest.raises(RuntimeError, match="cannot be saved again"):
        torch.jit.save(module, str(tmp_path / "again.pt"))


def test_truncated_weights_are_noticed_without_a_manifest(changed):
    module = torch.jit.load(changed(lambda c: c.update({"archive/data/0": b""}), forged=False))
    with pytest.raises(RuntimeError, match="a weight of a saved module is missing"):
        module(X)


def test_an_archive_in_the_form_of_large_ones(changed, small, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    path = changed(lambda c: None)
    assert b"PK\6\7" in path.read_bytes()[-42:]
    assert torch.equal(tvmify.load(path)(X), tvmify.load(small)(X))


def test_names_equal_but_for_case_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "archive"
    with file.open("w+b") as archive, zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("archive/code/Net.py", b"1")
        writer.writestr("archive/code/net.py", b"2")
        writer.close()
        with pytest.raises(AmbiguousArchive, match=r"two records of one name: .*net.py"):
            manifest.seal(archive, {})
