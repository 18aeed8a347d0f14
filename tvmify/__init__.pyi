"""What `tvmify/__init__.py` imports on demand, for type checkers and the documentation."""

from tvmify import cache
from tvmify.decorate.decorated import (
    Decorated,
    cache_info,
    explain,
    is_decorated,
    refresh,
    warmup,
)
from tvmify.decorate.decorator import tvmify
from tvmify.dispatch.counts import CacheInfo
from tvmify.dispatch.explanation import ExplainedSignature, ExplainedSubject, Explanation
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
from tvmify.integrations.compile import compile
from tvmify.integrations.enable import disable, enable
from tvmify.options import CompileOptions, Options
from tvmify.runtime import cmake_prefix_path, inspect, load
from tvmify.saved.pt2 import export
from tvmify.saved.saving import save
from tvmify.signature import TensorSpec
from tvmify.warming import Outcome, Warmed, warm_cache

__all__ = [
    "ArchiveError",
    "BuildError",
    "CacheError",
    "CacheInfo",
    "CacheMiss",
    "CaptureError",
    "CompileOptions",
    "Decorated",
    "ExplainedSignature",
    "ExplainedSubject",
    "Explanation",
    "GradientsNeeded",
    "NativeLibraryError",
    "NotCompiled",
    "OptionError",
    "Options",
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
    "compile",
    "disable",
    "enable",
    "explain",
    "export",
    "inspect",
    "is_decorated",
    "load",
    "refresh",
    "save",
    "tvmify",
    "warm_cache",
    "warmup",
]

__version__: str
