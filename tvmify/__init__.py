"""Compile PyTorch modules with Apache TVM: one decorator, cached programs, zero-copy calls.

`tvmify.tvmify` decorates, `tvmify.save` and `tvmify.load` write and read compiled models,
`tvmify.warm_cache` compiles ahead of time. The module itself is callable, so that
``import tvmify; @tvmify`` works as well as ``from tvmify import tvmify``; type checkers know the
second form only.

Names are imported when they are first used (PEP 562), so that the command line does not wait for
torch. ``__init__.pyi`` says the same to type checkers.
"""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

from tvmify.torch_compat import versions as _versions

__version__ = metadata.version("tvmify")

_HOMES = {
    "tvmify.decorate.decorated": "Decorated cache_info explain is_decorated refresh warmup",
    "tvmify.decorate.decorator": "tvmify",
    "tvmify.dispatch.counts": "CacheInfo",
    "tvmify.dispatch.explanation": "ExplainedSignature ExplainedSubject Explanation",
    "tvmify.errors": """
        ArchiveError BuildError CacheError CacheMiss CaptureError GradientsNeeded
        NativeLibraryError NotCompiled OptionError SaveError TrainingMode TvmifyError
        TvmifyWarning UnsupportedInput UnsupportedOperator UnsupportedTarget WarmUpError""",
    "tvmify.integrations.compile": "compile",
    "tvmify.integrations.enable": "disable enable",
    "tvmify.options": "CompileOptions Options",
    "tvmify.runtime": "cmake_prefix_path inspect load",
    "tvmify.saved.pt2": "export",
    "tvmify.saved.saving": "save",
    "tvmify.signature": "TensorSpec",
    "tvmify.warming": "Outcome Warmed warm_cache",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ["cache", *_HOME_OF]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "cache":
        return importlib.import_module("tvmify.cache")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOME_OF[name] != "tvmify.errors":
        _check_torch()
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def _check_torch() -> None:
    # What an unsupported PyTorch lacks would be another error in each of its versions.
    if complaint := _versions.complaint(_versions.installed_torch()):
        raise importlib.import_module("tvmify.errors").NativeLibraryError(complaint)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CallableModule(ModuleType):
    """Makes ``import tvmify; @tvmify`` work like ``from tvmify import tvmify; @tvmify``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tvmify(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

# If torch is imported already, waiting gains nothing, and torch.jit.load and torch.export.load find
# the operators of saved files without another import.
if "torch" in sys.modules:
    for _name in __all__:
        __getattr__(_name)
