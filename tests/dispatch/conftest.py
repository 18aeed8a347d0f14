"""What several tests of the dispatcher use."""

from __future__ import annotations

from typing import Any

import pytest

from tvmify.dispatch import miss


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call that was captured."""
    found: list[int] = []
    capture = miss.capture

    def counted(callable_: Any, args: Any, kwargs: Any, varying: Any) -> Any:
        found.append(len(args[0]))
        return capture(callable_, args, kwargs, varying)

    monkeypatch.setattr(miss, "capture", counted)
    return found
