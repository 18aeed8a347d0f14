from __future__ import annotations

import errno

import pytest

from tvmify.system.third_party_messages import Shortage, shortage, system_error_number


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("std::bad_alloc", Shortage.MEMORY),
        ("LLVM ERROR\n  at frame 3: out of memory", Shortage.MEMORY),
        ("can't start new thread", Shortage.THREADS),
        ("Writing a compiled library to memory failed", Shortage.FILE_IN_MEMORY),
        ("x.so: failed to map segment from shared object", Shortage.EXECUTABLE_MEMORY),
        ("a wrong shape\nFile can't start new thread.py", None),
        ("", None),
    ],
)
def test_shortage_is_recognized_by_its_message(message: str, found: Shortage | None) -> None:
    assert shortage(RuntimeError(message)) is found


def test_a_system_error_is_known_by_its_text() -> None:
    assert system_error_number(RuntimeError("write: No space left on device")) == errno.ENOSPC
    assert system_error_number(RuntimeError("a wrong shape\nPermission denied")) is None
