from __future__ import annotations

import importlib.metadata
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.cli.caches import add, run
from tvmify.cli import findings
from tvmify.cli.findings import ERROR, OK, WARNING, Finding
from tvmify.errors import NativeLibraryError
from tvmify.torch_compat import versions as supported


def found(*options: object) -> dict[str, dict[str, Any]]:
    """Return the findings by subject, without compiling anything."""
    document = json.loads(run("doctor", "--quick", "--json", *options).output)
    return {finding["subject"]: finding for finding in document["findings"]}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)


def test_working_installation_passes(
    cache_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))  # for a checkout that is not installed
    add(cache_directory)
    result = run("doctor", "--cache", cache_directory)
    assert result.exit_code == 0, result.output
    for text in ("torch: 2.", "built against torch==", "1 entries", "free", "same numbers"):
        assert text in result.output
    assert ERROR not in result.output
    assert "\x1b" not in result.output


def test_json_and_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("doctor", "--quick", "--json")
    assert result.exit_code == 0
    assert json.loads(result.output)["ok"]
    monkeypatch.setenv("TVMIFY_SYSTEM_LINKER", "1")
    monkeypatch.setenv("CC", "/no/compiler")
    monkeypatch.delenv("CXX", raising=False)
    result = run("doctor", "--quick", "--json")
    assert result.exit_code == 1
    document = json.loads(result.output)
    assert not document["ok"]
    (error,) = (finding for finding in document["findings"] if finding["status"] == ERROR)
    assert "/no/compiler" in error["detail"] and "apt-get install g++" in error["advice"]
    assert "1 of" in run("doctor", "--quick").output


def test_which_linker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    (both,) = findings.linker()
    assert both.status == OK and "tvmify's own" in both.detail and "g++" in both.detail
    monkeypatch.setenv("PATH", "")
    (ours,) = findings.linker()
    assert ours.status == OK and "tvmify's own" in ours.detail and "no C++ compiler" in ours.detail
    monkeypatch.setenv("TVMIFY_SYSTEM_LINKER", "1")
    (none,) = findings.linker()
    assert none.status == ERROR and "Unset TVMIFY_SYSTEM_LINKER" in none.advice


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.1+cu130", "tvm": "0.28", "ffi": "1.0", "rich": "1"}
    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        lambda _: ["torch==2.13.*", "tvm==0.27", "gone>=1", "rich>=13.0", 'x==1; extra == "dev"'],
    )

    def version(package: str) -> str:
        if package not in {**versions, "tvmify": ""}:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions.get(package, "0.1.0")

    monkeypatch.setattr(importlib.metadata, "version", version)
    statuses = {finding.subject: finding for finding in findings.versions()}
    assert statuses["torch"].status == OK
    assert statuses["tvm"].status == ERROR and "pip install 'tvm==0.27'" in statuses["tvm"].advice
    assert statuses["gone"].status == ERROR
    assert set(statuses) == {"tvmify", "supported", "torch", "tvm", "gone"}
    assert "PyTorch 2." in statuses["supported"].detail


def test_unsupported_pytorch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    text = supported.complaint("2.9.1")
    monkeypatch.setattr(supported, "installed_torch", lambda: "2.9.1")
    finding = {finding.subject: finding for finding in findings.versions()}["supported"]
    assert finding.status == ERROR and finding.detail in text
    assert f"pip install '{supported.torch_requirement()}'" in finding.advice


def test_unloadable_native_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise NativeLibraryError("built for another")

    # A module whose import raises.
    broken = types.ModuleType("tvmify.runtime.native")
    broken.__getattr__ = lambda _: refuse()  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "tvmify.runtime.native", broken)
    monkeypatch.setattr("tvmify.runtime.cpu_features", refuse)
    statuses = found()
    assert statuses["native library"]["status"] == ERROR
    assert "built for another" in statuses["native library"]["detail"]
    assert "CPU" not in statuses and "cache" in statuses


def test_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("tvmify.runtime.cpu_features", lambda: ("sse4.2",))
    monkeypatch.setattr("torch.get_num_threads", lambda: 10**6)
    cpu, threads = findings.processor()
    assert cpu.status == threads.status == WARNING
    assert "OMP_NUM_THREADS=" in threads.advice


def test_shared_directory_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    finding = found("--cache", tmp_path)["cache"]
    assert finding["status"] == ERROR and "chmod 700" in finding["detail"]


def test_missing_directory_is_accepted(cache_directory: Path) -> None:
    finding = found()["cache"]
    assert finding["status"] == OK and str(cache_directory) in finding["detail"]
    assert not cache_directory.exists()


def test_unwritable_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    (finding,) = findings.cache(tmp_path)
    assert finding.status == WARNING and "TVMIFY_CACHE_DIR" in finding.advice


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_LITTLE_SPACE", 1 << 80)
    (finding,) = findings.cache(tmp_path)
    assert finding.status == WARNING and "free" in finding.detail


def test_damaged_entries(tmp_path: Path) -> None:
    key = add(tmp_path)
    (tmp_path / key.digest / "manifest.json").write_text("")
    assert run("verify", "--cache", tmp_path).exit_code == 1
    assert found("--cache", tmp_path)["damaged entries"]["status"] == WARNING


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMIFY_CACHE_DIRECTORY", "/x\x1b[2J")
    monkeypatch.setenv("TVMIFY_DISABLE", "1")
    monkeypatch.setenv("TVMIFY_CACHE_SIZE", "many")
    statuses = found()
    assert statuses["TVMIFY_CACHE_DIRECTORY"]["advice"] == "Did you mean TVMIFY_CACHE_DIR?"
    assert statuses["TVMIFY_DISABLE"]["status"] == WARNING
    assert statuses["TVMIFY_COMPARE"]["status"] == OK
    assert statuses["TVMIFY_CACHE_SIZE"]["status"] == ERROR
    result = run("doctor", "--quick")
    assert result.exit_code == 1 and "\x1b" not in result.output


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("echo $2 >&2; exit 3", "was not compiled: "),
        ("exit 3", "exit code 3"),
        ("exec sleep 60", "within 1 seconds"),
        ("echo $$", "different numbers"),
    ],
)
def test_failing_round_trip_is_reported(
    program: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    (finding,) = findings.round_trip(1)
    assert isinstance(finding, Finding)
    assert finding.status == ERROR and detail in finding.detail and finding.advice


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (none,) = findings.gpus()
    assert none.status == OK and "none" in none.detail
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr("tvmify.compiler.cuda.nvcc.find", lambda: "/cuda/bin/nvcc")
    assert [*findings.gpus()] == [
        Finding(OK, "GPU 0", "Some GPU (sm_90a)"),
        Finding(OK, "CUDA compiler", "/cuda/bin/nvcc"),
    ]
    monkeypatch.setattr("tvmify.compiler.cuda.nvcc.find", lambda: None)
    monkeypatch.setattr("tvmify.compiler.cuda.nvrtc.find", lambda: None)
    _, missing = findings.gpus()
    assert missing.status == WARNING and "cuda-bindings" in missing.advice
