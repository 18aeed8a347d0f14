"""The position of a value in the tensor that it is a view of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tvm import relax, tirx

from tests.compiler.kernels.kernels import random
from tests.compiler.symbolic import build, check
from tvmify.compiler import sizes
from tvmify.compiler.passes.views import common_axes, is_transpose, permutation
from tvmify.compiler.sizes import Range

S, T = tirx.Var("s0", "int64"), tirx.Var("s1", "int64")
#: Shapes whose guards, without a range, say that the symbol is even.
HALVES = [S // 2, 2]


@pytest.fixture(params=[2, 3, 16])
def hint(request: pytest.FixtureRequest) -> Iterator[int]:
    with sizes.symbols({name: Range(request.param, 2, 512) for name in ("s0", "s1")}):
        yield request.param


@pytest.mark.parametrize(
    ("shape", "source", "groups"),
    [
        ([S, 12], [S, 3, 4], [([0], [0]), ([1], [1, 2])]),
        ([S * T, 4], [S, T, 4], [([0], [0, 1]), ([1], [2])]),
        ([S, T, 4], [T * S, 4], [([0, 1], [0]), ([2], [1])]),
        (HALVES, [S], [([0, 1], [0])]),
        ([S], HALVES, [([0], [0, 1])]),
        ([5, *HALVES], [5, S], [([0], [0]), ([1, 2], [1])]),
        ([*HALVES, 5], [S, 5], [([0, 1, 2], [0, 1])]),
        ([S, 5], [*HALVES, 5], [([0, 1], [0, 1, 2])]),
        ([S // 2 * 2], [S], [([0], [0])]),
    ],
)
def test_axes_are_in_groups_of_as_many_elements(hint, shape, source, groups):
    assert list(common_axes(shape, source)) == groups


def test_pairs_of_rows():
    def describe(builder, x):
        rows, columns = x.ty.shape.values
        pairs = builder.emit(relax.op.reshape(x, [rows // 2, 2, columns]))
        return relax.op.permute_dims(pairs, [1, 0, 2])

    program = build(describe, [(("s0", 5), "float32")])
    for rows in (2, 8, 16, 18, 34):
        check(program, lambda x: x.reshape(-1, 2, 5).transpose(1, 0, 2), [random(rows, 5)])


@pytest.mark.parametrize(
    ("rank", "axes", "expected"),
    [(3, None, [2, 1, 0]), (3, [0, -1, 1], [0, 2, 1]), (1, [0], [0])],
)
def test_axes_of_a_permutation_count_from_the_first(
    rank: int, axes: list[int] | None, expected: list[int]
) -> None:
    x = relax.Var("x", relax.TensorType([2, 3, 4][:rank], "float32"))
    call = relax.BlockBuilder().normalize(relax.op.permute_dims(x, axes))
    assert permutation(call) == expected
    assert is_transpose(call) == (expected == [0, 2, 1])
    assert permutation(x) is None
