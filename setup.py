"""Builds the native part, and declares its dependencies; the rest is in pyproject.toml.

``tvmify/lib/libtvmify.so`` needs no Python: a C++ program can load it. ``tvmify/_C`` handles every
call from Python, and is linked to it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from torch.utils import cpp_extension

NATIVE = Path("tvmify/native")
LIBRARY = "tvmify.lib.libtvmify"
# Only CI turns warnings into errors: another compiler with more warnings must not fail a build.
WARNINGS = ["-Wall", "-Wextra", *(["-Werror"] if os.environ.get("TVMIFY_WERROR") == "1" else [])]


# The supported versions; tvmify itself cannot be imported before it is built.
SUPPORTED = runpy.run_path("tvmify/torch_compat/versions.py")
if complaint := SUPPORTED["complaint"](importlib.metadata.version("torch")):
    raise SystemExit(complaint)


def versions(*names: str) -> str:
    """Return requirements that only the installed versions of these packages meet."""
    return " ".join(f"{name}=={importlib.metadata.version(name)}" for name in names)


DEPENDENCIES = [
    # PyTorch's C++ interface changes with every minor version, so a build works with one only.
    f"torch=={SUPPORTED['minor'](importlib.metadata.version('torch'))}.*",
    "apache-tvm==0.27.0.post1",
    # TVM requires "0.1.14.post0 or later", but its tuner crashes with 0.1.15; 0.1.13 does not load.
    "apache-tvm-ffi==0.1.14.post1",
    "cachetools>=5.3",
    "fsspec>=2023.1",  # for cache="s3://…"; torch requires it, too
    "numpy>=1.24",
    "platformdirs>=4.0",
    "rich>=13.0",
    "typer>=0.12",
    "typing_extensions>=4.10",
]


def address() -> str:
    """Return the URL of the sources: the workflow that makes releases knows it, others do not."""
    names = "GITHUB_SERVER_URL", "GITHUB_REPOSITORY"
    parts = [os.environ[name] for name in names if os.environ.get(name)]
    return "/".join(parts) if len(parts) == len(names) else ""


def long_description() -> str:
    """Return README.md for a package index, where links to files would be broken.

    They lead to the sources, or are plain text if the address is not known.
    """

    def absolute(link: re.Match[str]) -> str:
        text, path = link.groups()
        revision = os.environ.get("GITHUB_SHA", "HEAD")
        return f"[{text}]({address()}/blob/{revision}/{path})" if address() else text

    readme = Path("README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)", absolute, readme)


# The versions that compiled programs and the library are linked to. The library refuses others,
# since it depends on the layout of their objects.
RUNTIME = versions("apache-tvm", "apache-tvm-ffi")
BUILT_AGAINST = f"{versions('torch')} {RUNTIME}"


def package_directory(name: str) -> Path:
    """Return where a package is installed, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"building tvmify needs the package {name}; see pyproject.toml")
    return Path(spec.origin).parent


TVM, TVM_FFI = package_directory("tvm"), package_directory("tvm_ffi")


# For example "address,undefined": `.ci/sanitize` builds with them, in a separate folder.
SANITIZERS = os.environ.get("TVMIFY_SANITIZE", "")


def sanitizer_args() -> list[str]:
    """Return flags of the sanitizers for compiler and linker, to go after all others."""
    if not SANITIZERS:
        return []
    # PyTorch hides the type information that the check of virtual tables needs. Optimization would
    # double the build time.
    checks = [f"-fsanitize={SANITIZERS}", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"]
    # GCC advises against -Werror here: the checks cause warnings about correct code.
    return [*checks, "-Wno-error", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS", "-O0", "-g1"]


def sanitizer_link_args() -> list[str]:
    """Return flags of the sanitizers to link our two libraries."""
    if not SANITIZERS:
        return []
    # TVM's libraries contain the same template functions, uninstrumented: ours must call their own.
    return [*sanitizer_args(), "-Wl,-Bsymbolic-functions"]


def sources(folder: Path) -> list[str]:
    """Return the C++ files in a folder, or for a build from scratch a few files that include them.

    Most of the time goes into PyTorch's headers, which are then parsed once per processor instead
    of once per file. This requires that names in anonymous namespaces differ.
    """
    files = sorted(folder.glob("*.cpp"))
    if not SANITIZERS and os.environ.get("TVMIFY_JOIN_SOURCES") != "1":
        return [str(path) for path in files]
    joined = Path("build", "joined")
    joined.mkdir(parents=True, exist_ok=True)
    parts = min(int(os.environ.get("MAX_JOBS", "2")), len(files))
    paths = [joined / f"{folder.name}_{part}.cpp" for part in range(parts)]
    for part, path in enumerate(paths):
        text = "".join(f'#include "{file.absolute()}"\n' for file in files[part::parts])
        if not path.exists() or path.read_text() != text:  # otherwise keep it older than its object
            path.write_text(text)
    return [str(path) for path in paths]


def compile_args() -> list[str]:
    """Return flags for all our files."""
    # System headers cause no warnings.
    includes = [*cpp_extension.include_paths(), TVM / "include", TVM_FFI / "include"]
    includes.append(sysconfig.get_path("include"))
    system = [f"-isystem{path}" for path in includes]
    # PyTorch sets the language standard: C++17 in 2.11, C++20 since 2.12.
    flags = ["-O2", "-g0", "-fopenmp", "-fvisibility=hidden", *WARNINGS]
    return [*flags, *system, *sanitizer_args()]


# Where C++ programs find the library's dependencies: in its own folder, or where pip installs them,
# from tvmify/lib and from tvmify/builds/torch-2.13/lib (.ci/merge_wheels.py). Python loads them
# beforehand, by full path.
SEARCH = [
    "$ORIGIN",
    *(
        f"$ORIGIN/{up}/{name}/lib"
        for up in ("../..", "../../../..")
        for name in ("torch", "tvm", "tvm_ffi")
    ),
]


def native_library() -> Extension:
    """Return the library that TorchScript and C++ programs load."""
    extension = cpp_extension.CppExtension(
        LIBRARY,
        sources(NATIVE),
        depends=sorted(map(str, NATIVE.glob("*.h"))),
        define_macros=[
            ("TVMIFY_BUILT_AGAINST", f'"{BUILT_AGAINST}"'),
            ("TVMIFY_RUNTIME", f'"{RUNTIME}"'),
        ],
        extra_compile_args=compile_args(),
        # Our code uses TVM's runtime by name only, at run time: without --no-as-needed, the linker
        # would leave it out.
        extra_link_args=[
            "-fopenmp",
            f"-L{TVM / 'lib'}",
            f"-L{TVM_FFI / 'lib'}",
            # Without a soname, programs would look for it where they were linked to it.
            "-Wl,-soname,libtvmify.so",
            f"-Wl,-rpath,{':'.join(SEARCH)}",
            "-Wl,--no-as-needed",
            "-ltvm_runtime",
            "-ltvm_ffi",
            *sanitizer_link_args(),
        ],
    )
    extension.libraries.remove("torch_python")
    return extension


def python_module() -> Extension:
    """Return the extension module that handles calls from Python."""
    return cpp_extension.CppExtension(
        "tvmify._C",
        sources(NATIVE / "python"),
        depends=sorted(map(str, [*NATIVE.glob("*.h"), *(NATIVE / "python").glob("*.h")])),
        extra_compile_args=compile_args(),
        extra_link_args=["-Wl,-rpath,$ORIGIN/lib", "-l:libtvmify.so", *sanitizer_link_args()],
    )


class BuildNative(cpp_extension.BuildExtension):
    """Builds the library, then the module that is linked to it."""

    def finalize_options(self) -> None:
        """Keep objects where the next build finds them; setuptools would use a new folder."""
        given = self.build_temp  # sanitizers have a separate folder
        super().finalize_options()
        if given is not None:
            return
        torch = importlib.metadata.version("torch")
        tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}-torch-{torch}"
        self.build_temp = str(Path("build", "objects", tag))

    def get_ext_filename(self, ext_name: str) -> str:
        """Name the library without a tag for Python's ABI, which it does not use."""
        # setuptools passes the full name or its last part.
        if LIBRARY.endswith(ext_name):
            return str(Path(*ext_name.split(".")).with_suffix(".so"))
        return super().get_ext_filename(ext_name)

    def build_extensions(self) -> None:
        """Report a missing compiler before PyTorch fails to find one."""
        compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"there is no C++ compiler to build tvmify's native part: {compiler} is not found. "
                "Install g++ (apt-get install g++), or name a compiler by CXX=path. A wheel needs "
                "none: pip takes it where one fits the installed Python and PyTorch."
            )
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Build an extension, with the library on the linker's path."""
        ext.library_dirs.append(str(Path(self.build_lib, "tvmify", "lib").absolute()))
        super().build_extension(ext)

    def copy_extensions_to_source(self) -> None:
        """Make the folder of the library for editable installs: git has no files in it."""
        Path("tvmify/lib").mkdir(exist_ok=True)
        super().copy_extensions_to_source()


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls={"Repository": address()} if address() else {},
    install_requires=DEPENDENCIES,
    ext_modules=[native_library(), python_module()],
    cmdclass={"build_ext": BuildNative},
)
