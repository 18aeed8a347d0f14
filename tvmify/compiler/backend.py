"""What differs in the compiler between kinds of targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tvm
from tvm import relax, tirx
from tvm.s_tir.dlight.base import ScheduleRule

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


@dataclass(frozen=True)
class Backend:
    """The parts of `tvmify.compiler.pipeline` that depend on the kind of the target.

    Attributes
    ----------
    described
        Lower what converters only describe, as attention.
    before_legalizing
        Takes operators out that are not lowered one by one.
    legalizers
        How operators become TIR where TVM's own way is wrong or slow.
    after_fusing, after_scheduling
        Join functions that the passes of TVM leave apart.
    rules
        Those that schedule functions, in the order in which they are tried, by their names.
    finished
        Does to a scheduled function what no schedule can.
    """

    described: tuple[tvm.transform.Pass, ...]
    before_legalizing: tvm.transform.Pass
    legalizers: Mapping[str, Legalize]
    after_fusing: tuple[tvm.transform.Pass, ...]
    rules: Mapping[str, ScheduleRule]
    after_scheduling: tuple[tvm.transform.Pass, ...]
    finished: Callable[[tirx.PrimFunc], tirx.PrimFunc] = lambda function: function


def is_for_gpu() -> bool:
    """Whether the program is compiled for a GPU: the target whose scope is open says so."""
    target = tvm.target.Target.current(allow_none=True)
    return target is not None and target.kind.name == "cuda"
