"""What a forward that is recorded must not do: seed the generator it draws from.

Recording would seed it once, and leave that out of the program.
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
    """Refuse what a forward does in this context to torch's generator but draw from it.

    Raises
    ------
    CaptureError
        It seeds the generator. One that it makes itself, it may seed.
    """
    generator = torch.random.default_generator
    torch.random.default_generator = _Unseeded(generator)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.random.default_generator = generator
