"""Finds and loads the native library, without importing TVM.

Importing this module loads everything that compiled code needs: TVM's small runtime (not its
compiler), ``lib/libtvmify.so``, which registers ``torch.classes.tvmify``, and then ``tvmify._C``.
Both lie in the package, or, in a wheel for several versions of PyTorch, in a folder for each:
``tvmify/builds/torch-2.13``. The order matters, so other modules import the names in ``_C`` from
`tvmify.runtime`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
from pathlib import Path

import torch

import tvmify
from tvmify.errors import NativeLibraryError
from tvmify.torch_compat import versions

_REINSTALL = "Reinstall tvmify in this environment: pip install --force-reinstall --no-deps tvmify."
_REBUILD = "pip install --force-reinstall --no-deps --no-build-isolation --no-binary tvmify tvmify"


def _directory(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise NativeLibraryError(f"the package {package!r} is not installed. {_REINSTALL}")
    return Path(spec.origin).parent


def _native_part(package: Path) -> Path:
    """Return the folder of the native part for the PyTorch that is imported."""
    builds = package / "builds"
    if not builds.is_dir():
        return package
    found = versions.minor(torch.__version__)
    wanted = builds / f"torch-{found}"
    if not wanted.is_dir():
        names = sorted(path.name for path in builds.glob("torch-*"))
        there = ", ".join(name.removeprefix("torch-") for name in names)
        raise NativeLibraryError(
            f"this tvmify is built for PyTorch {there}, and {torch.__version__} is installed: "
            f"install one of these, or build tvmify for PyTorch {found}: {_REBUILD}"
        )
    return wanted


def _cmake_prefix_path() -> str:
    package = Path(__file__).parents[1]
    places = [package / "share" / "cmake"]
    # An installed package finds its dependencies beside itself; an editable install does not.
    places += [_directory(name).parent for name in ("torch", "tvm", "tvm_ffi")]
    return ";".join(dict.fromkeys(str(place) for place in places if place != package.parent))


#: For CMake's ``find_package(tvmify)``, as ``CMAKE_PREFIX_PATH``; several paths if tvmify is not
#: installed beside torch and TVM.
cmake_prefix_path = _cmake_prefix_path()


def _load_library(path: Path, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=mode)
    except OSError as error:
        raise NativeLibraryError(f"cannot load {path}: {error}. {_REINSTALL}") from error


def _check_versions(built_against: str) -> None:
    """Compare the packages that the library was compiled against with those installed.

    Parameters
    ----------
    built_against
        Requirements as setup.py wrote them, e.g. ``"torch==2.13.0+cpu apache-tvm==0.27.0"``.

    Raises
    ------
    NativeLibraryError
        One differs, so its objects may have another layout.
    """
    if complaint := versions.complaint(torch.__version__):
        raise NativeLibraryError(complaint)
    for requirement in built_against.split():
        package, _, built = requirement.partition("==")
        if package == "torch":
            wanted, found = versions.minor(built), versions.minor(torch.__version__)
            if wanted != found:
                raise NativeLibraryError(
                    f"this tvmify is built for PyTorch {wanted}, and {torch.__version__} is "
                    f"installed: run: pip install 'torch=={wanted}.*', or build tvmify for PyTorch "
                    f"{found}: {_REBUILD}"
                )
        elif (installed := importlib.metadata.version(package)) != built:
            raise NativeLibraryError(
                f"the native library was built for {package} {built}, but {installed} is "
                f"installed. {_REINSTALL}"
            )


def _read_built_against(path: Path) -> str:
    """Return the packages that a library was compiled against, without loading it.

    One that was compiled against another PyTorch lacks symbols here, or finds objects of another
    layout while it registers its operators.
    """
    try:
        found = re.search(rb"torch==\d[^\0]*", path.read_bytes())
    except OSError as error:
        raise NativeLibraryError(f"cannot load {path}: {error}. {_REINSTALL}") from error
    if found is None:
        raise NativeLibraryError(f"{path} is not tvmify's library, or is damaged. {_REINSTALL}")
    return found[0].decode()


def _load() -> ctypes.CDLL:
    folder = _native_part(Path(__file__).parents[1])
    path = folder / "lib" / "libtvmify.so"
    _check_versions(_read_built_against(path))
    # Loaded by full path, since our library's run paths only work in site-packages; and globally,
    # since kernels refer to the runtime's functions by bare name.
    _load_library(_directory("tvm_ffi") / "lib" / "libtvm_ffi.so", ctypes.RTLD_GLOBAL)
    _load_library(_directory("tvm") / "lib" / "libtvm_runtime.so", ctypes.RTLD_GLOBAL)
    library = _load_library(path)
    library.tvmify_built_against.restype = ctypes.c_char_p
    if str(folder) not in tvmify.__path__:
        tvmify.__path__.append(str(folder))  # where `tvmify._C` lies that is linked to it
    return library


_library = _load()


def built_against() -> str:
    """Return the packages that the library was compiled against, as requirements."""
    return _library.tvmify_built_against().decode()


# After the libraries that it links to.
from tvmify._C import (  # noqa: E402
    Call,
    Guard,
    LatestCall,
    Lent,
    ShapeGuard,
    Shortcut,
    flatten,
    take_failure,
    with_method_renamed,
)


def cpu_features() -> tuple[str, ...]:
    """Return LLVM's names of the instruction sets that this machine's CPU has."""
    return tuple(torch.ops.tvmify.cpu_features())


__all__ = [
    "Call",
    "Guard",
    "LatestCall",
    "Lent",
    "ShapeGuard",
    "Shortcut",
    "cmake_prefix_path",
    "cpu_features",
    "flatten",
    "take_failure",
    "with_method_renamed",
]
