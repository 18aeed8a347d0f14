"""How long sums may be, and how reductions are cut into blocks of such a length."""

from __future__ import annotations

from math import isqrt

from tvmify.compiler.costs import MATMUL
from tvmify.compiler.kernels.common import choice

#: A sum over more elements than this violates the accuracy policy. With ``accuracy="strict"`` the
#: limit depends on the number of elements, but is at least the second number.
LONGEST_SUM, _SHORTEST_STRICT_SUM = 1024, 16


def longest_sum(depth: int) -> int:
    """Return the most elements that one sum may accumulate, for a reduction of this depth. Errors
    are smallest if blocks are as long as there are blocks; strict accuracy uses twice that length,
    which takes fewer blocks.
    """
    if not choice.is_strict():
        return LONGEST_SUM
    return max(2 * isqrt(depth), _SHORTEST_STRICT_SUM)


def split_evenly(length: int, longest: int) -> int:
    """Return the length of blocks, up to a limit. Blocks are equal if that is not much shorter than
    the limit; otherwise the last one is shorter.
    """
    if length <= longest:
        return length
    least = max(longest // MATMUL.even, 1)
    alike = (size for size in range(longest, least, -1) if length % size == 0)
    return next(alike, -(-length // -(-length // longest)))
