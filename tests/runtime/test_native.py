"""Loading the native library, and its description of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import run_python
from tvmify.errors import NativeLibraryError
from tvmify.runtime import cpu_features, native
from tvmify.torch_compat import versions

CURRENT = native._library.tvmify_built_against().decode()


def test_installed_versions_are_accepted():
    native._check_versions(CURRENT)
    native._check_versions(f"torch=={versions.minor(torch.__version__)}.99+cu130")


@pytest.mark.parametrize("built", ["apache-tvm==0.26.0", "apache-tvm-ffi==9"])
def test_other_versions_are_refused(built):
    with pytest.raises(NativeLibraryError, match=r"was built for .* is installed\. Reinstall"):
        native._check_versions(built)


def test_a_build_for_another_pytorch_says_how_to_mend_it():
    with pytest.raises(NativeLibraryError) as caught:
        native._check_versions("torch==2.7.1+cpu apache-tvm==0")
    text = str(caught.value)
    assert "built for PyTorch 2.7," in text and f"and {torch.__version__} is installed" in text
    assert "pip install 'torch==2.7.*'" in text and "--no-binary tvmify" in text


def test_build_versions_are_read_before_loading(tmp_path):
    library = native._native_part(Path(native.__file__).parents[1]) / "lib" / "libtvmify.so"
    assert native._read_built_against(library) == CURRENT
    other = tmp_path / "libtvmify.so"
    other.write_bytes(library.read_bytes()[:10000])
    with pytest.raises(NativeLibraryError, match=r"damaged\. Reinstall"):
        native._read_built_against(other)


def test_of_several_native_parts_the_one_for_the_installed_pytorch_is_loaded(tmp_path):
    package = Path(native.__file__).parents[1]
    part = native._native_part(package)
    installed = f"torch-{versions.minor(torch.__version__)}"
    tree = tmp_path / "tvmify"
    (tree / "builds").mkdir(parents=True)
    for path in package.iterdir():
        if path.name not in ("lib", "builds") and path.suffix != ".so":
            (tree / path.name).symlink_to(path)
    for name in ("torch-2.1", installed):
        (tree / "builds" / name).mkdir()
    for path in [*part.glob("_C.*.so"), part / "lib"]:
        (tree / "builds" / installed / path.name).symlink_to(path)
    script = "import sys; sys.path.insert(0, sys.argv[1]); from tvmify import runtime, _C; " + (
        "from tvmify.dispatch.keys import _compiler_digest as digest; "
        "print(runtime.native._library._name, _C.__file__, digest())"
    )
    done = run_python(script, tmp_path)
    build = tree / "builds" / installed
    library, module, digest = done.stdout.split()
    assert digest  # keys work in spite of the second folder of the package
    assert Path(library) == build / "lib" / "libtvmify.so" and Path(module).parent == build


def test_no_native_part_for_the_installed_pytorch_says_how_to_mend_it(tmp_path):
    for name in ("torch-2.1", "torch-2.2"):
        (tmp_path / "builds" / name).mkdir(parents=True)
    with pytest.raises(NativeLibraryError) as caught:
        native._native_part(tmp_path)
    text = str(caught.value)
    assert "built for PyTorch 2.1, 2.2, and" in text and "--no-binary tvmify" in text


def test_a_missing_library_or_package_is_named():
    with pytest.raises(NativeLibraryError, match="cannot load /nowhere"):
        native._load_library(Path("/nowhere.so"))
    with pytest.raises(NativeLibraryError, match="cannot load /nowhere"):
        native._read_built_against(Path("/nowhere.so"))
    with pytest.raises(NativeLibraryError, match="'no_such_package' is not installed"):
        native._directory("no_such_package")


def test_cpu_features_match_linux():
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
    run_python(script)
