"""The matrices of Winograd's minimal filtering, from the points of Cook and Toom.

``y = A^T ((G g) * (B^T d))`` correlates `d` with `g`. Error analysis: B. Barabasz et al., "Error
Analysis and Improving the Accuracy of Winograd Convolution for Deep Neural Networks", 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod

from tvm import tirx
from tvm.ir import Expr

Matrix = tuple[tuple[Fraction, ...], ...]


def _points(*numbers: str) -> tuple[Fraction, ...]:
    return tuple(Fraction(number) for number in numbers)


#: Finite points by number of results and taps; infinity is one more. Points of opposite sign are
#: neighbours. For four results of three taps, the textbook's 0, ±1, ±2 have three to nine times the
#: errors of these, near 1/√2 and √2. The others had the smallest errors among those compared.
POINTS = {
    (2, 2): _points("0", "1"),
    (2, 3): _points("0", "1", "-1"),
    (4, 2): _points("1/2", "-1/2", "1", "-1"),
    (4, 3): _points("0", "181/256", "-181/256", "181/128", "-181/128"),
    (4, 4): _points("3/8", "-3/8", "1", "-1", "13/8", "-13/8"),
}


@dataclass(frozen=True)
class Transforms:
    """The three matrices of one dimension.

    Attributes
    ----------
    points
        The points that they are computed from, without infinity; none if each result is one
        product.
    data
        B^T, the transform of inputs.
    filter
        G, the transform of the filter.
    result
        A^T, the transform of products to results.
    """

    points: tuple[Fraction, ...]
    data: Matrix
    filter: Matrix
    result: Matrix


@lru_cache
def transforms(results: int, taps: int) -> Transforms:
    """Return the matrices for F(results, taps), in exact fractions."""
    if taps == 1:
        same = tuple(tuple(Fraction(int(i == j)) for i in range(results)) for j in range(results))
        return Transforms((), same, ((Fraction(1),),) * results, same)
    points = POINTS[results, taps]
    data, filter_ = [], []
    for j, point in enumerate(points):
        others = [*points[:j], *points[j + 1 :]]
        scale = prod((point - other for other in others), start=Fraction(1))
        data.append((*_polynomial(others), Fraction(0)))
        filter_.append(tuple(point**power / scale for power in range(taps)))
    data.append(_polynomial(points))
    filter_.append((*[Fraction(0)] * (taps - 1), Fraction(1)))
    result = [
        (*(point**power for point in points), Fraction(int(power == results - 1)))
        for power in range(results)
    ]
    return Transforms(points, tuple(data), tuple(filter_), tuple(result))


def _polynomial(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Coefficients of ∏ (x - root), the constant one first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        scaled = [root * c for c in coefficients] + [Fraction(0)]
        coefficients = [a - b for a, b in zip(shifted, scaled, strict=True)]
    return tuple(coefficients)


@dataclass(frozen=True)
class Filtering:
    """Several results of a filter of some taps at a stride, from fewer products.

    At a stride of two, even taps see even inputs and odd taps odd ones: two filters of half the
    taps, whose results are added. If it saves no products, only `reach` is defined.
    """

    results: int
    taps: int
    stride: int

    @property
    def lengths(self) -> list[int]:
        """How many taps there are at every stride, from the first, the second … on."""
        return [len(range(phase, self.taps, self.stride)) for phase in range(self.stride)]

    @property
    def saves(self) -> bool:
        """Whether there are points for it, fewer than the products of all results and taps."""
        known = all(length == 1 or (self.results, length) in POINTS for length in self.lengths)
        return known and self.points < self.results * self.taps

    @property
    def phases(self) -> list[Transforms]:
        """The matrices for each of these filters."""
        return [transforms(self.results, length) for length in self.lengths]

    @property
    def points(self) -> int:
        """How many products there are."""
        return sum(len(phase.data) for phase in self.phases)

    @property
    def reach(self) -> int:
        """How many inputs the results see."""
        return (self.results - 1) * self.stride + self.taps

    def data(self, point: Expr, element: Callable[[int], Expr]) -> Expr:
        """One factor of a product, from `reach` inputs."""
        return self._factor(point, element, lambda phase: phase.data, "float32")

    def filter(self, point: Expr, element: Callable[[int], Expr], dtype: str) -> Expr:
        """The other factor, from the taps."""
        return self._factor(point, element, lambda phase: phase.filter, dtype)

    def result(self, number: Expr, product: Callable[[int], Expr]) -> Expr:
        """One result, from the products."""
        totals = []
        for y in range(self.results):
            terms, first = [], 0
            for phase in self.phases:
                terms += _by_pairs(phase, y, lambda i, first=first: product(first + i))
                first += len(phase.data)
            totals.append(_combination(terms, "float32"))
        return _choose(totals, number)

    def _factor(
        self,
        point: Expr,
        element: Callable[[int], Expr],
        matrix: Callable[[Transforms], Matrix],
        dtype: str,
    ) -> Expr:
        totals = []
        for start, phase in enumerate(self.phases):

            def own(i: int, start: int = start) -> Expr:
                return element(start + i * self.stride)

            flipped = int(Fraction(0) in phase.points)
            totals += [_by_parity(line, own, flipped, dtype) for line in matrix(phase)]
        return _choose(totals, point)


def _choose(values: Sequence[Expr], number: Expr) -> Expr:
    """One of several values; its index is constant once the loop is unrolled."""
    chosen = values[-1]
    for i in reversed(range(len(values) - 1)):
        chosen = tirx.Select(number == i, values[i], chosen)
    return chosen


# Two points that differ in sign share most of their arithmetic, if LLVM finds equal expressions. So
# the inputs of a tile of F4 take 144 operations instead of 288.


def _by_parity(
    coefficients: Sequence[Fraction], element: Callable[[int], Expr], flipped: int, dtype: str
) -> Expr:
    """Add to some columns a multiple of the others, whose sign is that of the point.

    These are the odd ones if zero is among the points, otherwise the even ones.
    """
    plain, signed = (
        [(c, element(i)) for i, c in enumerate(coefficients) if c != 0 and i % 2 == parity]
        for parity in (1 - flipped, flipped)
    )
    if signed:
        factor = signed[-1][0]
        plain.append((factor, _combination([(c / factor, term) for c, term in signed], dtype)))
    return _combination(plain, dtype)


def _by_pairs(
    phase: Transforms, number: int, product: Callable[[int], Expr]
) -> list[tuple[Fraction, Expr]]:
    """Multiples of the sums or differences of each pair, after those of single points."""
    coefficients, points = phase.result[number], phase.points
    single, paired = [], []
    i = 0
    while i < len(coefficients):
        if i + 1 < len(points) and points[i] == -points[i + 1]:
            one, other = product(i), product(i + 1)
            same = coefficients[i] == coefficients[i + 1]
            paired.append((coefficients[i], one + other if same else one - other))
            i += 2
        else:
            single.append((coefficients[i], product(i)))
            i += 1
    return [(c, term) for c, term in single + paired if c != 0]


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
