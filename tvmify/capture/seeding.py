"""Refuses a forward that seeds the generator it draws from. Recording would seed it once, and the
program would not contain the seeding.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from tvmify.errors import CaptureError


class _Unseeded:
    """Stands for torch's generator while one thread records."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._recording = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed") and threading.get_ident() == self._recording:
            raise CaptureError(f"forward calls torch.{name}", "Seed before the call instead.")
        return getattr(self._generator, name)


@contextlib.contextmanager
def refusing_seeds() -> Iterator[None]:
    """Refuse anything that a forward does to torch's generator other than draw from it.

    Raises
    ------
    CaptureError
        It seeds the generator. It may seed generators that it creates.
    """
    generator = torch.random.default_generator
    torch.random.default_generator = _Unseeded(generator)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.random.default_generator = generator
