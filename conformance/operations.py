"""The operations of random programs, with the operands and arguments drawn for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True)
class Value:
    """An operand, computed while the program is drawn.

    Attributes
    ----------
    tensor
        Its value for the inputs of the program.
    exact
        Whether compiled code and eager compute identical elements, so that comparisons, conversions
        to integers and positions of maxima are equal.
    """

    tensor: Tensor
    exact: bool

    @property
    def is_bool(self) -> bool:
        """Whether its elements are bools."""
        return self.tensor.dtype is torch.bool

    @property
    def is_float(self) -> bool:
        """Whether its elements are floats."""
        return self.tensor.dtype.is_floating_point


Fits = Callable[[Value], bool]
#: Draws arguments for operands.
Arguments = Callable[[Draw, list[Value]], tuple[Any, ...]]


@dataclass(frozen=True)
class Operation:
    """One kind of step.

    Attributes
    ----------
    function
        Takes the operands, then the arguments.
    fits
        For each operand, whether a value is allowed.
    arguments
        Draws the other arguments.
    rounds
        Whether floats are rounded differently from eager's.
    """

    function: Callable[..., Tensor]
    fits: tuple[Fits, ...]
    arguments: Arguments = lambda draw, operands: ()
    rounds: bool = False


def _any(value: Value) -> bool:
    return True


def _number(value: Value) -> bool:
    return not value.is_bool


def _float(value: Value) -> bool:
    return value.is_float


def _without_infinity(value: Value) -> bool:
    return _float(value) and not bool(value.tensor.isinf().any())


def _int(value: Value) -> bool:
    return not value.is_float and not value.is_bool


def _bool(value: Value) -> bool:
    return value.is_bool


def _exact(value: Value) -> bool:
    return value.exact


def _small(value: Value) -> bool:
    return value.is_float and bool((value.tensor.abs() <= 8).all())


def _convertible(value: Value) -> bool:
    return value.exact and bool(value.tensor.isfinite().all())


def _exact_number(value: Value) -> bool:
    return value.exact and not value.is_bool


def _dims(value: Value) -> bool:
    return value.tensor.dim() > 0


def _float_dims(value: Value) -> bool:
    return value.is_float and value.tensor.dim() > 0


def _not_empty(value: Value) -> bool:
    return not value.is_bool and value.tensor.dim() > 0 and value.tensor.numel() > 0


def _exact_not_empty(value: Value) -> bool:
    return value.exact and _not_empty(value)


def _indices(value: Value) -> bool:
    return _int(value) and value.tensor.dim() > 0


def _matrix(value: Value) -> bool:
    return value.is_float and value.tensor.dim() >= 2


def _dim(draw: Draw, operands: list[Value]) -> int:
    rank = operands[0].tensor.dim()
    return draw(st.integers(-rank, rank - 1))


def _one_dim(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    return (_dim(draw, operands),)


def _dims_and_keepdim(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    rank = operands[0].tensor.dim()
    dims = draw(st.lists(st.integers(0, max(rank - 1, 0)), unique=True, max_size=rank))
    return dims, draw(st.booleans())


def _dim_and_keepdim(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    return _dim(draw, operands), draw(st.booleans())


def _scalar(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    return (draw(st.sampled_from([2, -1, 0, 0.5, -1.5])),)


def _divisor(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    return (draw(st.sampled_from([2, 3, -2, 1])),)


def _limits(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    low, high = draw(st.sampled_from([-1, 0, None])), draw(st.sampled_from([1, 2, -2]))
    return (low, high) if draw(st.booleans()) else (high, None)


def _permutation(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    return (draw(st.permutations(range(operands[0].tensor.dim()))),)


def _new_shape(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    shape = list(operands[0].tensor.shape)
    if draw(st.booleans()):
        rest = operands[0].tensor.numel()
        shape = []
        for _ in range(draw(st.integers(0, 3)) if rest else 0):
            shape.append(draw(st.sampled_from([f for f in (1, 2, 3, 5, rest) if rest % f == 0])))
            rest //= shape[-1]
        return ([*shape, rest],)
    at = draw(st.integers(0, len(shape)))
    return ([*shape[:at], 1, *shape[at:]],)


def _place(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    rank = operands[0].tensor.dim()
    return (draw(st.integers(-rank - 1, rank)),)


def _cut(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    bounds = st.integers(-4, 6)
    return _dim(draw, operands), draw(bounds), draw(bounds), draw(st.integers(1, 3))


def _slice(tensor: Tensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    at = [slice(None)] * tensor.dim()
    at[dim] = slice(start, stop, step)
    return tensor[tuple(at)]


def _larger(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    own = [draw(st.sampled_from([0, 2, 3])) if n == 1 else n for n in operands[0].tensor.shape]
    return ([*draw(st.lists(st.integers(0, 3), max_size=1)), *own],)


def _selected(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    dim = draw(st.sampled_from([d for d, n in enumerate(operands[0].tensor.shape) if n]))
    size = operands[0].tensor.shape[dim]
    return dim, draw(st.integers(-size, size - 1))


def _padding(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    return (draw(st.lists(st.integers(0, 2), min_size=2, max_size=2)),)


def _shifts(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    return draw(st.integers(-3, 3)), _dim(draw, operands)


def _count(draw: Draw) -> int:
    return draw(st.integers(1, 3))


def _copies(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    return _count(draw), _dim(draw, operands)


def _diagonal(draw: Draw, operands: list[Value]) -> tuple[Any, ...]:
    return (draw(st.integers(-2, 2)),)


def _index_select(tensor: Tensor, index: Tensor, dim: int) -> Tensor:
    return torch.index_select(tensor, dim, index.flatten() % tensor.shape[dim])


def _gather(tensor: Tensor, dim: int) -> Tensor:
    places = torch.arange(tensor.numel()).reshape(tensor.shape) * 7 % tensor.shape[dim]
    return torch.gather(tensor, dim, places)


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor[index % tensor.shape[0]]


def _columns(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor[..., index % tensor.shape[-1]]


def _halves(tensor: Tensor, dim: int) -> Tensor:
    first, *rest = torch.chunk(tensor, 2, dim)
    return torch.cat([*rest, first], dim)


def _unary(function: Callable[[Tensor], Tensor], fits: Fits, rounds: bool = False) -> Operation:
    return Operation(function, (fits,), rounds=rounds)


_DTYPES = st.tuples(st.sampled_from([torch.float32, torch.int64, torch.bool]))

OPERATIONS: dict[str, Operation] = {
    "neg": _unary(torch.neg, _number),
    "abs": _unary(torch.abs, _number),
    "relu": _unary(torch.relu, _number),
    "sign": _unary(torch.sign, _exact_number),
    "floor": _unary(torch.floor, _exact_number),
    "round": _unary(torch.round, _exact_number),
    "isnan": _unary(torch.isnan, _any),
    "square": _unary(torch.square, _number),
    "exp": _unary(torch.exp, _small, True),
    "tanh": _unary(torch.tanh, _float, True),
    "sigmoid": _unary(torch.sigmoid, _float, True),
    "gelu": _unary(F.gelu, _without_infinity, True),  # oneDNN gives NaN
    "silu": _unary(F.silu, _float, True),
    "sin": _unary(torch.sin, _small, True),
    "root": _unary(lambda x: torch.sqrt(1 + x * x), _float, True),
    "quotient": Operation(lambda x, y: x / (1 + y * y), (_float, _float), rounds=True),
    "add": Operation(torch.add, (_any, _any)),
    "sub": Operation(torch.sub, (_number, _number)),
    "mul": Operation(torch.mul, (_any, _any)),
    "maximum": Operation(torch.maximum, (_any, _any)),
    "minimum": Operation(torch.minimum, (_any, _any)),
    "where": Operation(torch.where, (_bool, _any, _any)),
    # Not for bools: TorchScript drops `+ 0`, and with it the promotion.
    "add_scalar": Operation(torch.add, (_number,), _scalar),
    "mul_scalar": Operation(torch.mul, (_any,), _scalar),
    "rsub": Operation(torch.rsub, (_number,), _scalar),
    "clamp": Operation(torch.clamp, (_number,), _limits),
    "floor_divide": Operation(torch.floor_divide, (_exact_number,), _divisor),
    "remainder": Operation(torch.remainder, (_exact_number,), _divisor),
    "lt": Operation(torch.lt, (_exact, _exact)),
    "ge": Operation(torch.ge, (_exact, _exact)),
    "eq": Operation(torch.eq, (_exact, _exact)),
    "gt_scalar": Operation(torch.gt, (_exact,), _scalar),
    "ne_scalar": Operation(torch.ne, (_exact,), _scalar),
    "logical_and": Operation(torch.logical_and, (_exact, _exact)),
    "logical_xor": Operation(torch.logical_xor, (_exact, _exact)),
    "logical_not": _unary(torch.logical_not, _exact),
    "bitwise_or": Operation(torch.bitwise_or, (_int, _int)),
    "to": Operation(torch.Tensor.to, (_convertible,), lambda draw, _: draw(_DTYPES)),
    "sum": Operation(torch.sum, (_any,), _dims_and_keepdim, True),
    "mean": Operation(torch.mean, (_float,), _dims_and_keepdim, True),
    "amax": Operation(torch.amax, (_not_empty,), _dims_and_keepdim),
    "amin": Operation(torch.amin, (_not_empty,), _dims_and_keepdim),
    "prod": Operation(torch.prod, (_float_dims,), _dim_and_keepdim, True),
    "any": Operation(torch.any, (_exact,), _dims_and_keepdim),
    "all": Operation(torch.all, (_exact,), _dims_and_keepdim),
    "argmax": Operation(torch.argmax, (_exact_not_empty,), _dim_and_keepdim),
    "cumsum": Operation(torch.cumsum, (_dims,), _one_dim, True),
    "softmax": Operation(torch.softmax, (_float_dims,), _one_dim, True),
    "log_softmax": Operation(torch.log_softmax, (_float_dims,), _one_dim, True),
    "matmul": Operation(torch.matmul, (_float_dims, _float_dims), rounds=True),
    "gram": _unary(lambda x: x @ x.transpose(-1, -2), _matrix, True),
    "reshape": Operation(torch.reshape, (_any,), _new_shape),
    "flatten": _unary(torch.flatten, _any),
    "permute": Operation(torch.permute, (_any,), _permutation),
    "unsqueeze": Operation(torch.unsqueeze, (_any,), _place),
    "squeeze": _unary(torch.squeeze, _any),
    "slice": Operation(_slice, (_dims,), _cut),
    "select": Operation(torch.select, (_not_empty,), _selected),
    "expand": Operation(torch.Tensor.expand, (_any,), _larger),
    "flip": Operation(torch.flip, (_dims,), lambda draw, o: ([_dim(draw, o)],)),
    "repeat_interleave": Operation(torch.repeat_interleave, (_dims,), _copies),
    "tile": Operation(torch.tile, (_dims,), lambda draw, o: ([_count(draw), _count(draw)],)),
    "roll": Operation(torch.roll, (_dims,), _shifts),
    "pad": Operation(F.pad, (_dims,), _padding),
    "tril": Operation(torch.tril, (_matrix,), _diagonal),
    "halves": Operation(_halves, (_dims,), _one_dim),
    "cat": Operation(lambda x, y, dim: torch.cat([x, y], dim), (_dims, _dims), _one_dim),
    "stack": Operation(lambda x, y, dim: torch.stack([x, y], dim), (_any, _any), _place),
    "index_select": Operation(_index_select, (_not_empty, _indices), _one_dim),
    "gather": Operation(_gather, (_not_empty,), _one_dim),
    "rows": Operation(_rows, (_not_empty, _indices)),
    "columns": Operation(_columns, (_not_empty, _indices)),
}


def result_of(
    operation: Operation, operands: list[Value], arguments: tuple[Any, ...], elements: int = 512
) -> Value | None:
    """Compute a step while it is drawn; None if eager refuses it, or its result is too large.

    Values that grow from step to step lose their digits in the end, and tensors of more than
    `elements` elements cost time.
    """
    try:
        tensor = operation.function(*(value.tensor for value in operands), *arguments)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    if tensor.numel() > elements or largest(tensor) > 1e4:
        return None
    rounded = operation.rounds and tensor.is_floating_point()
    return Value(tensor, not rounded and all(value.exact for value in operands))


def largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude, at least 1."""
    finite = tensor[tensor.isfinite()].double()
    return max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)
