"""Functions whose source file was edited after it was imported.

TorchScript compiles what the file contains now, Python runs what it contained at the import: in a
notebook with an editor open, or in a service whose files are replaced while it runs.
"""

from __future__ import annotations
import __future__ as future

import functools
import inspect
import operator
import os
import time
import types
from pathlib import Path
from typing import Any

from tvmify.capture.questions import nested

#: Flags of ``from __future__ import``, also where ``exec`` inherited them from its caller.
_FUTURE = functools.reduce(
    operator.or_, (getattr(future, name).compiler_flag for name in future.all_feature_names)
)


def is_edited(function: Any) -> bool:
    """Whether a function's source file no longer holds its code.

    Files older than the process are not read, so this costs a ``stat``.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if not isinstance(code, types.CodeType):
        return False
    try:
        changed = Path(code.co_filename).stat().st_mtime_ns
    except OSError:
        return False  # no file, such as the cell of a notebook
    if changed < _start_of_process():
        return False
    return code not in _codes_in(code.co_filename, changed, code.co_flags & _FUTURE)


@functools.cache
def _start_of_process() -> int:
    """Return when this process began, in nanoseconds of the wall clock."""
    # proc(5): field 22 is in clock ticks since boot; field 2, a name, may hold spaces.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot


@functools.lru_cache(maxsize=64)
def _codes_in(path: str, changed: int, flags: int) -> frozenset[types.CodeType]:
    """Return the code of all functions in a file; `changed` tells its versions apart."""
    del changed
    try:
        whole = compile(Path(path).read_bytes(), path, "exec", flags, dont_inherit=True)
    except (OSError, SyntaxError, ValueError):  # gone, or half written
        return frozenset()
    return frozenset(nested(whole))
