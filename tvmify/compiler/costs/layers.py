"""Attention and recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

from tvmify.compiler.costs.source import LAYERS, VMS, XEON, estimate, measured, number


@dataclass(frozen=True)
class Attention:
    """Attention kernels."""

    #: Queries that share each read of keys and values that do not fit in L2.
    far_queries: int = number(48, "queries", measured(VMS, "c0af7c7", LAYERS))
    #: The inverse of the share of L1 for the scores of a block.
    scores: int = number(
        3, "1/L1 sizes", estimate("c0af7c7", "keys and values stream through the rest")
    )
    #: If queries are few, the number of queries per loaded key.
    rows: int = number(
        4, "queries", estimate("0087fb3", "with 4 keys, 16 sums hide the latency of additions")
    )
    #: Keys that are multiplied at a time.
    keys: int = number(
        4, "keys", estimate("0087fb3", "with 4 queries, 16 sums are half of 32 registers")
    )
    #: Vectors of a head whose weighted values are summed at a time for each query.
    vectors: int = number(
        4, "vectors", estimate("0087fb3", "with 4 queries, 16 sums are half of 32 registers")
    )
    #: The multiply-adds of vectors that merging narrow products must save, since slices take time.
    worth_merging: int = number(1 << 14, "multiply-adds", measured(XEON, "f412a1e", LAYERS))


@dataclass(frozen=True)
class Recurrent:
    """Recurrent layers."""

    #: The most vectors of each gate, since more are never faster and pad more.
    most_gate_vectors: int = number(2, "vectors", measured(VMS, "bb9e067", LAYERS))
    #: Vectors of sums that a tile of a projection has.
    projected_sums: int = number(
        8, "vectors", estimate("3563d7f", "two units with a latency of 4 cycles start 8 additions")
    )


ATTENTION = Attention()
RECURRENT = Recurrent()
