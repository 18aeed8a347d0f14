"""The values of ``torch.tensor([...])`` in code that is recorded, which branches may depend on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._subclasses import fake_tensor
from torch.fx.experimental import proxy_tensor

#: How many elements a literal may have whose values are known: a table of sizes has fewer.
_MOST_ELEMENTS = 64


@contextlib.contextmanager
def known_literals() -> Iterator[None]:
    """Let code that is recorded read small literals, and what is computed from them; use inside
    `tracing`.

    By default, torch knows only those with one element, and twice: the mode that records does not
    notice what is written to a view of one, the mode of fake tensors does.
    """
    before = fake_tensor.CONSTANT_NUMEL_LIMIT, proxy_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT, proxy_tensor.CONSTANT_NUMEL_LIMIT = _MOST_ELEMENTS, -1
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT, proxy_tensor.CONSTANT_NUMEL_LIMIT = before
