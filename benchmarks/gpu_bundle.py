"""Build one archive, without a GPU, for a first run on a machine that has one and installs nothing.

    python -m benchmarks.gpu_bundle [--arch sm_90a] [--cases '*'] [--output FILE.tar.xz]

It contains tvmify without its compiler, TVM's runtime, and each case of the GPU benchmark twice: as
a file of `tvmify.save` with code for the GPU, and as a program of ``torch.export`` for eager
PyTorch. All weights are zero, so that the archive is small; ``run.py`` fills them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import shutil
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import torch

import tvmify
from benchmarks.gpu_worker import CASES, loaded
from benchmarks.models import chosen

#: The largest archive that can be uploaded.
MOST_BYTES = 60 << 20
RUNNER = Path(__file__).with_name("gpu_first_run.py")
#: The parts of TVM that run programs; each is found by a module of that name.
RUNTIMES = {"tvm": ["libtvm_runtime.so", "libtvm_runtime_cuda.so"], "tvm_ffi": ["libtvm_ffi.so"]}
#: Packages whose versions tvmify looks up, and those it imports that PyTorch does not install.
DISTRIBUTIONS = ("tvmify", "apache-tvm", "apache-tvm-ffi")
IMPORTED = ("cachetools", "platformdirs")


def main(arguments: list[str] | None = None) -> None:
    """Build the archive, and refuse one that is too large."""
    parser = argparse.ArgumentParser(description="Pack an archive for a first run on a GPU.")
    parser.add_argument("--arch", default="sm_90a", help="GPU architecture (default: sm_90a)")
    parser.add_argument("--cases", default="*", help="names or patterns (default: all)")
    parser.add_argument("--output", type=Path, default=Path("build/gpu-bundle.tar.xz"))
    given = parser.parse_args(arguments)
    try:
        names = chosen(given.cases, list(CASES))
    except ValueError as error:
        parser.error(str(error))
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tvmify-bundle-") as scratch:
        folder = Path(scratch, "gpu-bundle")
        add_runtime(folder / "site")
        shutil.copy(RUNNER, folder / "run.py")
        shutil.copy(RUNNER.with_name("gpu_timing.py"), folder)
        for name in names:
            print(f"{name} for {given.arch} …", flush=True)
            add_case(folder / "models", name, given.arch)
        with tarfile.open(given.output, "w:xz", preset=1) as archive:
            archive.add(folder, folder.name)
    size = given.output.stat().st_size
    if size > MOST_BYTES:
        sys.exit(f"{given.output} has {size >> 20} MiB, more than {MOST_BYTES >> 20}")
    print(f"{given.output}: {size / 2**20:.1f} MiB, for Python {sysconfig.get_python_version()}")
    print(
        f"and PyTorch {torch.__version__.rpartition('.')[0]}. There: tar xf {given.output.name} &&"
    )
    print("python3 gpu-bundle/run.py")


def add_runtime(site: Path) -> None:
    """Copy tvmify and what it loads as if installed, without compilers."""
    package = Path(tvmify.__path__[0])
    unwanted = shutil.ignore_patterns("__pycache__", "compiler", "native", "share")
    shutil.copytree(package, site / "tvmify", ignore=unwanted)
    for name, libraries in RUNTIMES.items():
        target = site / name / "lib"
        target.mkdir(parents=True)
        (site / name / "__init__.py").touch()
        for library in libraries:
            shutil.copy(_package(name) / "lib" / library, target)
    for name in IMPORTED:
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(_package(name), site / name, ignore=unwanted)
    for name in DISTRIBUTIONS:
        version = importlib.metadata.version(name)
        about = site / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (about / "METADATA").write_text(text)


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(name)
    return Path(spec.origin).parent


def add_case(folder: Path, name: str, arch: str) -> None:
    """Write a case in both forms."""
    folder.mkdir(parents=True, exist_ok=True)
    module, args = loaded(CASES[name], "cpu")
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.zero_()
        target = {"kind": "cuda", "arch": arch}
        path = folder / f"{name}.pt"
        tvmify.save(module, path, example_inputs=args, targets=[target])
        exported = torch.export.export(module, args, strict=False)
    torch.export.save(exported, path.with_suffix(".pt2"))


if __name__ == "__main__":
    main()
