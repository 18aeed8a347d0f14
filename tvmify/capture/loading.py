"""Imports torch's tracing stack, which a warm process never needs."""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path


def import_recorder() -> None:
    """Import torch's compiler, even if the working directory was deleted. On import it asks for
    that directory, as the place for its debug files.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        is_ours = "TORCH_COMPILE_DEBUG_DIR" not in os.environ
        os.environ.setdefault("TORCH_COMPILE_DEBUG_DIR", tempfile.gettempdir())
        try:
            importlib.import_module("torch._dynamo")
        finally:
            if is_ours:
                del os.environ["TORCH_COMPILE_DEBUG_DIR"]
