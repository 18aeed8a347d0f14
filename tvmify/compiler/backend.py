"""The parts of the compiler that depend on the kind of the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tvm
from tvm import relax, s_tir, tirx

from tvmify.compiler.microarchitecture import Microarchitecture

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


class Rule:
    """One way to schedule a PrimFunc.

    A rule finds its anchor block and fuses its surroundings, or returns None if it does not apply
    to the function. An exception is a bug in the rule, see
    `tvmify.compiler.kernels.common.rule.apply_in_turn`.
    """

    #: Name in the report.
    name: str = ""
    #: Blocks that a function must have, all of them, for the rule to be tried.
    anchors: frozenset[str] = frozenset()

    def schedule(self, sch: s_tir.Schedule, machine: Microarchitecture) -> s_tir.Schedule | None:
        """Transform the schedule in place and return it; None if the rule does not apply."""
        raise NotImplementedError


@dataclass(frozen=True)
class Backend:
    """The parts of `tvmify.compiler.pipeline` that depend on the kind of the target.

    Attributes
    ----------
    described
        Passes that lower what converters only describe, such as attention.
    before_legalizing
        Passes that extract operators which are not lowered one by one.
    legalizers
        Replacements for TVM's legalizers that are wrong or slow.
    after_fusing, after_scheduling
        Passes that merge functions which TVM's passes leave separate.
    rules
        The schedule rules by name, in the order in which they are tried.
    finished
        Changes a scheduled function where a schedule cannot.
    """

    described: tuple[tvm.transform.Pass, ...]
    before_legalizing: tvm.transform.Pass
    legalizers: Mapping[str, Legalize]
    after_fusing: tuple[tvm.transform.Pass, ...]
    rules: Mapping[str, Rule]
    after_scheduling: tuple[tvm.transform.Pass, ...]
    finished: Callable[[tirx.PrimFunc], tirx.PrimFunc] = lambda function: function


def is_for_gpu() -> bool:
    """Whether the current target is a GPU."""
    target = tvm.target.Target.current(allow_none=True)
    return target is not None and target.kind.name == "cuda"
