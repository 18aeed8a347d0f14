"""The versions of PyTorch and Python that tvmify supports: one table, quoted everywhere else.

``setup.py`` reads this file before anything is built, so it needs the standard library alone.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import NamedTuple


class Supported(NamedTuple):
    """A minor version that is supported.

    Attributes
    ----------
    version
        Such as ``"2.13"``.
    tests
        Which have run with it: ``"all"``, those of ``tests/smoke.txt`` (``"smoke"``) or ``"none"``
        yet; ``docs/versions.md`` has the results.
    """

    version: str
    tests: str


#: Oldest first, without gaps.
TORCH = (
    Supported("2.11", "all"),
    Supported("2.12", "smoke"),
    Supported("2.13", "all"),
    Supported("2.14", "smoke"),
    Supported("2.15", "all"),
)
PYTHON = (
    Supported("3.10", "smoke"),
    Supported("3.11", "all"),
    Supported("3.12", "smoke"),
    Supported("3.13", "smoke"),
)


def minor(version: str) -> str:
    """Return ``"2.13"`` for ``"2.13.0+cpu"``: C++ interfaces are stable within a minor version."""
    return ".".join(version.split(".")[:2])


def torch_requirement() -> str:
    """Return the supported range as pip takes it, such as ``"torch>=2.11,<2.15"``."""
    major, _, last = TORCH[-1].version.partition(".")
    return f"torch>={TORCH[0].version},<{major}.{int(last) + 1}"


def supported_torch() -> str:
    """Return the supported range in words, such as ``"PyTorch 2.11 to 2.14"``."""
    return f"PyTorch {TORCH[0].version} to {TORCH[-1].version}"


def complaint(installed: str | None) -> str:
    """Return why a PyTorch is not supported, and the command that installs one; empty if it is.

    Parameters
    ----------
    installed
        The version, such as ``"2.9.1+cpu"``; None where there is no PyTorch.
    """
    if installed is not None and minor(installed) in {row.version for row in TORCH}:
        return ""
    found = "none is installed" if installed is None else f"{installed} is installed"
    return (
        f"tvmify supports {supported_torch()}, and {found}: "
        f"run: pip install '{torch_requirement()}'"
    )


def installed_torch() -> str | None:
    """Return the version of the PyTorch that is imported, or would be; None if there is none."""
    # One that was built from source may be importable without being installed.
    if (torch := sys.modules.get("torch")) is not None:
        return torch.__version__
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
