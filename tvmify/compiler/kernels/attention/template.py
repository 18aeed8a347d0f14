"""Fused attention: which kernel computes it, and how it finds its operands.

Neither kernel stores the scores of all queries against all keys. `tiles` is for many queries,
`rows` for the few of a decoding step. Both are handwritten loops: no schedule primitive of TVM
produces their order of stages (scores, online softmax, weighted values) from a tensor expression.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmify.compiler import sizes
from tvmify.compiler.costs import CORE
from tvmify.compiler.kernels.attention import plan as attention_plans
from tvmify.compiler.kernels.attention import rows, tiles
from tvmify.compiler.kernels.attention.plan import Plan, Rows
from tvmify.compiler.kernels.attention.powers import exponent_scale
from tvmify.compiler.kernels.common import choice
from tvmify.compiler.kernels.common.emission import anchor, argument
from tvmify.compiler.kernels.common.legalizing import FUSIBLE
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.sizes import Size

if TYPE_CHECKING:
    from tvmify.compiler.kernels.common.sample import Sample

#: Of the rule, and of its anchor.
NAME = "attention"


@dataclass(frozen=True)
class Operand:
    """Queries, keys or values, wherever they lie.

    Attributes
    ----------
    shape
        Of the tensor, with four axes: ``[batch, length, heads, size]``, or with heads before
        length if `heads_first`.
    first, step
        Which heads of the tensor are the operand's, since several operands may share a tensor: the
        first one, and the distance between two.
    """

    shape: tuple[Size, Size, Size, Size]
    heads_first: bool = False
    first: int = 0
    step: int = 1

    def __str__(self) -> str:
        order = " heads first" if self.heads_first else ""
        whose = f" from {self.first} by {self.step}" if (self.first, self.step) != (0, 1) else ""
        return f"{'x'.join(map(str, self.shape))}{order}{whose}"

    @property
    def length(self) -> Any:
        """Number of queries or keys."""
        return self.shape[2 if self.heads_first else 1]

    def at(self, tensor: tirx.Buffer, batch: Expr, head: Expr, place: Expr, i: Expr) -> Expr:
        """Element `i` of one head at one place of the sequence."""
        head = head * self.step + self.first
        return tensor[(batch, head, place, i) if self.heads_first else (batch, place, head, i)]


@dataclass(frozen=True)
class Mask:
    """What is added to the scores; a bool mask means 0 and -∞, or `Attention.fill`.

    Attributes
    ----------
    shape
        ``[batch, heads, queries, keys]``, each of which may be 1, or with queries and keys swapped
        if `transposed`.
    """

    shape: tuple[Size, Size, Size, Size]
    dtype: str
    transposed: bool = False

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}"

    def value(self, tensor: tirx.Buffer, batch: Expr, head: Expr, query: Expr, key: Expr) -> Expr:
        """Read the element for a score."""
        index = (batch, head, key, query) if self.transposed else (batch, head, query, key)
        return tensor[
            tuple(0 if sizes.is_one(n) else i for i, n in zip(index, self.shape, strict=True))
        ]


@dataclass(frozen=True)
class Attention:
    """``softmax(query keyᵀ scale + mask) value`` for each head.

    Attributes
    ----------
    heads, shared
        Heads of the queries, and how many in turn share one head of keys and values.
    size, value_size
        Elements of a head of queries and keys, and of values and the result.
    causal
        Whether query `i` sees keys 0 to `i` only.
    empty
        The result for a query that sees no key.
    fill
        Replaces a score that a bool mask hides. None: -∞ is added to it, so that
        NaN stays NaN.
    """

    query: Operand
    key: Operand
    value: Operand
    mask: Mask | None
    batch: Any
    heads: int
    shared: int
    size: int
    value_size: int
    scale: float
    causal: bool = False
    empty: float = 0.0
    fill: float | None = None
    dtype: str = "float32"

    def __str__(self) -> str:
        """Return what decides how fast it is: not by how much scores are scaled."""
        heads = f"{self.batch}x{self.heads}{f'/{self.shared}' * (self.shared > 1)}"
        operands = f"{self.query}, {self.key}, {self.value}"
        mask = f" mask {self.mask}{' filled' * (self.fill is not None)}" if self.mask else ""
        causal = " causal" * self.causal
        sizes = f"{self.size} {self.value_size}"
        return f"attention {heads} {sizes} {self.dtype} of {operands}{mask}{causal}"

    @property
    def out(self) -> tuple[Any, Any, int, int]:
        """Shape of the result: ``[batch, length, heads, size]``."""
        return (self.batch, self.query.length, self.heads, self.value_size)

    def with_sizes(self, change: Callable[[Any], Any]) -> Attention:
        """Return it with other sizes; `change` maps each to its new value."""

        def changed(part: Any) -> Any:
            return replace(part, shape=tuple(map(change, part.shape)))

        return replace(
            self,
            query=changed(self.query),
            key=changed(self.key),
            value=changed(self.value),
            mask=None if self.mask is None else changed(self.mask),
            batch=change(self.batch),
        )

    @property
    def likely(self) -> Attention:
        """The same with a number for each size, for estimates."""
        return self.with_sizes(sizes.hint)

    @property
    def work(self) -> float:
        """Multiply-adds, with an exponential for each score."""
        scores = self.batch * self.heads * self.query.length * self.key.length
        return scores * (self.size + self.value_size + CORE.function)

    def masked(
        self, score: Expr, tensors: dict[str, tirx.Buffer], at: tuple[Expr, Expr, Expr, Expr]
    ) -> Expr:
        """Return a score as the softmax sees it.

        Parameters
        ----------
        score
            In units of `exponent_scale`.
        tensors
            The arguments of the kernel.
        at
            Batch, head, query and key.
        """
        lowest = tirx.const(-math.inf, self.dtype)
        if self.mask is not None:
            value = self.mask.value(tensors["mask"], *at)
            if self.mask.dtype != "bool":
                score = score + self._in_units(value)
            elif self.fill is None:
                score = score + T.Select(value, tirx.const(0, self.dtype), lowest)
            else:
                limit = self._largest if math.isfinite(self.fill) else math.inf
                fill = self.fill * exponent_scale(self.dtype)
                fill = tirx.const(max(-limit, min(fill, limit)), self.dtype)
                score = T.Select(value, score, fill)
        return T.Select(at[3] <= at[2], score, lowest) if self.causal else score

    def _in_units(self, value: Expr) -> Expr:
        """Return a mask value in the units of scores; one that is finite stays finite.

        The lowest finite number hides a key only from queries that see another key. If it is added
        to all keys of a query, they all count.
        """
        least = tirx.const(-self._largest, self.dtype)
        scaled = value * tirx.const(exponent_scale(self.dtype), self.dtype)
        return T.Select(value >= least, tirx.max(scaled, least), scaled)

    @property
    def _largest(self) -> float:
        return float(np.finfo(self.dtype).max)

    def has_few_queries(self, machine: Microarchitecture) -> bool:
        """Whether a vector of queries would be mostly empty."""
        return self.query.length * 4 <= machine.lanes(bits_of(self.dtype))


def choose(attention: Attention, machine: Microarchitecture, sample: Callable[[], Sample]) -> Plan:
    """Choose how to compute it.

    Parameters
    ----------
    attention
        With the original mask.
    sample
        Returns what candidates are measured by.
    """
    likely = attention.likely
    chosen = choice.choose(str(likely), attention_plans.candidates(attention, machine), sample)
    return attention_plans.for_all(chosen, attention, machine)


def prepared(mask: Mask, attention: Attention, plan: Plan) -> Mask:
    """Describe the mask in the layout that the kernel reads."""
    batch, heads, queries, keys = mask.shape
    if isinstance(plan, Rows) or queries == 1:
        return mask
    padded = sizes.ceil_div(attention.query.length, plan.queries) * plan.queries  # whole tasks
    return Mask((batch, heads, keys, padded), mask.dtype, transposed=True)


def kernel(attention: Attention, plan: Plan, machine: Microarchitecture) -> tirx.PrimFunc:
    """Return the function of query, key, value, mask (if there is one) and result."""
    operands = {"query": attention.query, "key": attention.key, "value": attention.value}
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_attr(FUSIBLE)
        tensors = {
            name: argument(name, operand.shape, attention.dtype)
            for name, operand in operands.items()
        }
        if attention.mask is not None:
            tensors["mask"] = argument("mask", attention.mask.shape, attention.mask.dtype)
        out = argument("out", attention.out, attention.dtype)
        with anchor(NAME, tensors.values(), out):
            tensors["out"] = out
            if isinstance(plan, Rows):
                rows.emit(attention, tensors, machine)
            else:
                tiles.emit(attention, tensors, plan, machine)
    return builder.get()
