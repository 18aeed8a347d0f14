"""Keeps a user's hooks on saved tensors from what only we compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


@contextlib.contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Hide the hooks of ``saved_tensors_hooks`` that are active.

    ``torch.utils.checkpoint`` counts with them what a forward saves for its backward, which must be
    as much when it runs again; what is computed in eager to compile a call is not part of that.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:  # type: ignore[attr-defined]
        yield
        return
    with saved_tensors_hooks(_same, _same):  # only the innermost hooks run
        yield


def _same(value: Any) -> Any:
    return value
