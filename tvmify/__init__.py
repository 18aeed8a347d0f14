"""Compile PyTorch modules with Apache TVM: one decorator, cached programs, zero-copy calls.

`tvmify.tvmify` decorates, `tvmify.save` and `tvmify.load` write and read compiled models,
`tvmify.warm_cache` compiles ahead of time. The module itself is callable, so that
``import tvmify; @tvmify`` works as well as ``from tvmify import tvmify``.
"""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType

from tvmify import cache
from tvmify.decorate.decorator import cache_info, explain, refresh, tvmify, warmup
from tvmify.dispatch.counts import CacheInfo
from tvmify.errors import (
    ArchiveError,
    BuildError,
    CacheError,
    CacheMiss,
    CaptureError,
    GradientsNeeded,
    NativeLibraryError,
    NotCompiled,
    OptionError,
    SaveError,
    TrainingMode,
    TvmifyError,
    TvmifyWarning,
    UnsupportedInput,
    UnsupportedOperator,
    UnsupportedTarget,
    WarmUpError,
)
from tvmify.options import CompileOptions
from tvmify.runtime import inspect, load
from tvmify.runtime.native import cmake_prefix_path as _cmake_prefix_path
from tvmify.saved.pt2 import export
from tvmify.saved.saving import save
from tvmify.signature import TensorSpec
from tvmify.warming import Outcome, Warmed, warm_cache

__version__ = metadata.version("tvmify")

#: For CMake's ``find_package(tvmify)``, as ``CMAKE_PREFIX_PATH``; several paths if tvmify is not
#: installed beside torch and TVM.
cmake_prefix_path = _cmake_prefix_path()

__all__ = [
    "ArchiveError",
    "BuildError",
    "CacheError",
    "CacheInfo",
    "CacheMiss",
    "CaptureError",
    "CompileOptions",
    "GradientsNeeded",
    "NativeLibraryError",
    "NotCompiled",
    "OptionError",
    "Outcome",
    "SaveError",
    "TensorSpec",
    "TrainingMode",
    "TvmifyError",
    "TvmifyWarning",
    "UnsupportedInput",
    "UnsupportedOperator",
    "UnsupportedTarget",
    "WarmUpError",
    "Warmed",
    "cache",
    "cache_info",
    "cmake_prefix_path",
    "explain",
    "export",
    "inspect",
    "load",
    "refresh",
    "save",
    "tvmify",
    "warm_cache",
    "warmup",
]


class _CallableModule(ModuleType):
    """Makes ``import tvmify; @tvmify`` work like ``from tvmify import tvmify; @tvmify``."""

    __call__ = staticmethod(tvmify)


sys.modules[__name__].__class__ = _CallableModule
