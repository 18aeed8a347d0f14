"""Loading the native library, and what it says of the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tvmify.errors import NativeLibraryError
from tvmify.runtime import cpu_features, native

CURRENT = native._library.tvmify_built_against().decode()


def test_the_versions_that_are_installed_pass():
    native._check_versions(CURRENT)
    native._check_versions("torch==2.13.99+cu130")


@pytest.mark.parametrize("built", ["torch==2.12.1+cpu", "apache-tvm==0.26.0", "apache-tvm-ffi==9"])
def test_other_versions_are_refused(built):
    with pytest.raises(NativeLibraryError, match=r"was built for .* is installed\. Reinstall"):
        native._check_versions(built)


def test_a_missing_library_or_package_is_named():
    with pytest.raises(NativeLibraryError, match="cannot load /nowhere"):
        native._load_library(Path("/nowhere.so"))
    with pytest.raises(NativeLibraryError, match="'no_such_package' is not installed"):
        native._directory("no_such_package")


def test_cpu_features_are_those_that_linux_reports():
    names = {"sse4.1": "sse4_1", "sse4.2": "sse4_2", "avx512vnni": "avx512_vnni", "lzcnt": "abm"}
    names |= {"avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16", "avxvnni": "avx_vnni"}
    names["amx-bf16"] = "amx_bf16"
    names |= {"sse3": "pni", "bmi": "bmi1"}
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), None)
    if flags is None:
        pytest.skip("not an x86 machine")
    features = cpu_features()
    assert features and all(names.get(feature, feature) in flags for feature in features)
    assert {"avx2", "avx512f"} & set(flags) == {"avx2", "avx512f"} & set(features)


def test_loading_the_runtime_does_not_import_tvm():
    script = (
        "import sys, tvmify.runtime; sys.exit('tvm' in sys.modules or 'tvm_ffi' in sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)
