"""Modes that see every operator of code that is recorded."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class RecordingMode(TorchDispatchMode):
    """A mode under which ``torch.cond`` and the like, which call Dynamo, can be recorded."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo run."""
        return True
