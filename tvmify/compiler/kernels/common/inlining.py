"""Decides which blocks are inlined into their consumers, by the cost of their expressions."""

from __future__ import annotations

from typing import NamedTuple

from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad
from tvm.s_tir.schedule import SBlockRV

from tvmify.compiler.costs import CORE
from tvmify.compiler.kernels.common.loops import blocks_of, is_injective, is_output, iterations
from tvmify.compiler.kernels.common.rewriting import collect
from tvmify.compiler.kernels.common.transposes import must_stay

#: The longest expression.
_LONGEST = 4000
_FUNCTIONS = frozenset(
    "exp exp2 exp10 expm1 log log2 log10 log1p tanh sigmoid erf pow sin cos tan sinh cosh asin "
    "acos atan asinh acosh atanh atan2 rsqrt fmod".split()
)
#: A condition counts this many times its length: TVM simplifies it again for each of the two
#: values, with several analyses. What is cast from a bool becomes the condition of a choice of one
#: or zero (`codegen.workarounds`), and indices may choose too, as those of a reflected border.
_PER_CONDITION = 5
#: The fields that hold the operands of statements and expressions.
_OPERANDS = ("value", "a", "b", *["condition"] * _PER_CONDITION, "true_value", "false_value")


def inline_cheap(sch: s_tir.Schedule) -> None:
    """Inline the element-wise blocks, unless that would repeat their work.

    A block that calls a function is kept if its elements are read more than once: by two stages,
    as the exponential of a softmax, or by many elements, as a sigmoid broadcast over an image.
    """
    for block in blocks_of(sch):
        if not is_injective(sch, block) or is_output(sch, block):
            continue
        consumers = sch.get_consumers(block)
        widest = max(iterations(sch, consumer) for consumer in consumers)
        often = len(consumers) > 1 or widest > 2 * iterations(sch, block)
        if (often and calls_function(sch, block)) or nests_too_deep(sch, block):
            continue
        if must_stay(sch, block):
            continue
        try:
            sch.compute_inline(block)
        except s_tir.ScheduleError:
            continue


def nests_too_deep(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether a consumer, with this block inlined, would be too long an expression.

    A value that is read twice is duplicated, so that ``x = x + x / 2`` doubles with every line, and
    conditions within conditions take TVM's simplifier minutes.
    """
    own = sch.get(block)
    length = _written_out(own.body).length
    for consumer in sch.get_consumers(block):
        whole = _written_out(sch.get(consumer).body, own.writes[0].source)
        if whole.reads * length > 1 and whole.length + whole.reads * length > _LONGEST:
            return True
    return False


def total_work(sch: s_tir.Schedule) -> float:
    """The cost of a function in multiply-adds."""
    return sum(
        iterations(sch, block) * (CORE.function if calls_function(sch, block) else 1)
        for block in blocks_of(sch)
    )


def calls_function(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether the block computes a function such as exp: tens of instructions an element."""
    return _written_out(sch.get(block).body).calls_function


class _Written(NamedTuple):
    """How long an expression is, how often it reads a tensor, whether it calls a function."""

    length: int
    reads: int
    calls_function: bool


def _written_out(node: object, tensor: tirx.Var | None = None) -> _Written:
    """Measure an expression, or a statement, and count its reads of a tensor."""
    if isinstance(node, TensorLoad):
        chosen = [i for i in node.indices if collect(i, tirx.Select)]
        length = 1 + sum(_written_out(index).length for index in chosen)
        return _Written(length, int(tensor is not None and node.source.same_as(tensor)), False)
    operands = [getattr(node, name, None) for name in _OPERANDS]
    if isinstance(node, Call):
        operands += node.args
    below = [_written_out(operand, tensor) for operand in operands if operand is not None]
    name = getattr(getattr(node, "op", None), "name", "").rpartition(".")[2]
    is_choice = isinstance(node, tirx.Cast) and (
        str(node.value.ty.dtype) == "bool" != str(node.ty.dtype)
    )
    factor = _PER_CONDITION if is_choice else 1
    return _Written(
        factor * (1 + sum(part.length for part in below)),
        factor * sum(part.reads for part in below),
        name in _FUNCTIONS or any(part.calls_function for part in below),
    )
