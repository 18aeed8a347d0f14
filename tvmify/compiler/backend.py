"""What differs in the compiler between kinds of targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tvm
from tvm import relax

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


@dataclass(frozen=True)
class Backend:
    """The parts of `tvmify.compiler.pipeline` that depend on the kind of the target.

    Attributes
    ----------
    described
        Lower what converters only describe, as attention (`passes/lower_attention.py`).
    before_legalizing
        Takes operators out that are not lowered one by one.
    legalizers
        How operators become TIR where TVM's own way is wrong or slow.
    after_fusing, after_scheduling
        Join functions that the passes of TVM leave apart.
    schedule
        Schedules every function of a module; also returns the name of the rule for each, which
        begins with ``"unscheduled"`` where none did.
    """

    described: tuple[tvm.transform.Pass, ...]
    before_legalizing: tvm.transform.Pass
    legalizers: Mapping[str, Legalize]
    after_fusing: tuple[tvm.transform.Pass, ...]
    schedule: Callable[[tvm.IRModule, tvm.target.Target], tuple[tvm.IRModule, dict[str, str]]]
    after_scheduling: tuple[tvm.transform.Pass, ...]


def is_for_gpu() -> bool:
    """Whether the program is compiled for a GPU: the target whose scope is open says so."""
    target = tvm.target.Target.current(allow_none=True)
    return target is not None and target.kind.name == "cuda"
