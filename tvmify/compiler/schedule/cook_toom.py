"""The matrices of Winograd's minimal filtering, from the points of Cook and Toom.

``y = A^T ((G g) * (B^T d))`` correlates `d` with `g`. Error analysis: B. Barabasz et al., "Error
Analysis and Improving the Accuracy of Winograd Convolution for Deep Neural Networks", 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from tvm import tirx
from tvm.ir import Expr

Matrix = tuple[tuple[Fraction, ...], ...]

#: Finite points for so many results at once; infinity is one more. Those for four are near 1/√2
#: and √2: the errors of the textbook's 0, ±1, ±2 are three to nine times larger.
POINTS = {
    2: (Fraction(0), Fraction(1), Fraction(-1)),
    4: (
        Fraction(0),
        Fraction(181, 256),
        Fraction(-181, 256),
        Fraction(181, 128),
        Fraction(-181, 128),
    ),
}


@dataclass(frozen=True)
class Transforms:
    """The three matrices of one dimension.

    Attributes
    ----------
    data
        B^T, what is multiplied with each stretch of input.
    filter
        G, what is multiplied with the filter.
    result
        A^T, what turns products into results.
    """

    data: Matrix
    filter: Matrix
    result: Matrix


@lru_cache
def transforms(results: int, taps: int = 3) -> Transforms:
    """Return the matrices for so many results of a filter of so many taps, in exact fractions."""
    points = POINTS[results]
    data, filter_ = [], []
    for j, point in enumerate(points):
        others = [*points[:j], *points[j + 1 :]]
        scale = Fraction(1)
        for other in others:
            scale *= point - other
        data.append((*_polynomial(others), Fraction(0)))
        filter_.append(tuple(point**power / scale for power in range(taps)))
    data.append(_polynomial(points))
    filter_.append((*[Fraction(0)] * (taps - 1), Fraction(1)))
    result = [
        (*(point**power for point in points), Fraction(int(power == results - 1)))
        for power in range(results)
    ]
    return Transforms(tuple(data), tuple(filter_), tuple(result))


def _polynomial(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Coefficients of ∏ (x - root), the constant one first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        scaled = [root * c for c in coefficients] + [Fraction(0)]
        coefficients = [a - b for a, b in zip(shifted, scaled, strict=True)]
    return tuple(coefficients)


def row(
    matrix: Matrix,
    index: Expr,
    element: Callable[[int], Expr],
    dtype: str = "float32",
    pairs: bool = False,
) -> Expr:
    """One row of a matrix times a vector.

    All rows are in the expression; which one it is, is known when the loop has been unrolled. Two
    points that differ in sign share most of their arithmetic where LLVM finds it spelt alike. Their
    rows of `data` and `filter` agree but for the signs of the odd columns; in `result`, they are
    `pairs` of columns. With that, a tile of F4 takes 144 operations for its inputs instead of 288.
    """
    combine = _by_pairs if pairs else _by_parity
    sums = [combine(coefficients, element, dtype) for coefficients in matrix]
    chosen = sums[-1]
    for i in reversed(range(len(sums) - 1)):
        chosen = tirx.Select(index == i, sums[i], chosen)
    return chosen


def _by_parity(
    coefficients: Sequence[Fraction], element: Callable[[int], Expr], dtype: str
) -> Expr:
    """Add the even columns to a multiple of the odd ones."""
    even, odd = (
        [(c, element(i)) for i, c in enumerate(coefficients) if c != 0 and i % 2 == parity]
        for parity in (0, 1)
    )
    if odd:
        factor = odd[-1][0]
        even.append((factor, _combination([(c / factor, term) for c, term in odd], dtype)))
    return _combination(even, dtype)


def _by_pairs(coefficients: Sequence[Fraction], element: Callable[[int], Expr], dtype: str) -> Expr:
    """Add multiples of the sums or differences of each pair to those of zero and infinity."""
    last = len(coefficients) - 1
    terms = [(coefficients[i], element(i)) for i in (0, last)]
    for i in range(1, last, 2):
        one, other = element(i), element(i + 1)
        same = coefficients[i] == coefficients[i + 1]
        terms.append((coefficients[i], one + other if same else one - other))
    return _combination([(c, term) for c, term in terms if c != 0], dtype)


def _combination(terms: Sequence[tuple[Fraction, Expr]], dtype: str) -> Expr:
    """Add multiples up; those by one come first, so that the others can be fused with them."""
    total = None
    for coefficient, term in sorted(terms, key=lambda pair: abs(pair[0]) != 1):
        size = abs(coefficient)
        if size != 1:
            term = term * tirx.const(float(size), dtype)
        if total is None:
            total = term if coefficient > 0 else tirx.const(0, dtype) - term
        else:
            total = total + term if coefficient > 0 else total - term
    return total
