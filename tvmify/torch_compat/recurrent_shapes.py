"""Result shapes of recurrent layers during capture and decomposition.

Such a layer stays one operator, and only the shapes of its results are needed. To find them, torch
runs all steps of all layers on fake tensors, about twenty operators each, twice per program: that
takes a second for 64 steps of two layers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import is_fake

aten = torch.ops.aten
_here = threading.local()
_GATES = {
    aten.lstm.input: 4,
    aten.gru.input: 3,
    aten.rnn_tanh.input: 1,
    aten.rnn_relu.input: 1,
}


@contextmanager
def recurrent_shapes() -> Iterator[None]:
    """Let recurrent layers compute only shapes, in this thread.

    Other threads may be tracing, and may need to decompose such a layer.
    """
    _install()
    before = getattr(_here, "depth", 0)
    _here.depth = before + 1
    try:
        yield
    finally:
        _here.depth = before


@functools.cache
def _install() -> None:
    """Replace torch's rules in both places where it looks for one: in capture, and later."""
    from torch._decomp import decomposition_table  # a slow import, which capture has done already

    for operator, gates in _GATES.items():
        for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd):
            if key in operator.py_kernels:  # not in every version of torch
                operator.py_kernels[key] = _shapes_or(operator.py_kernels[key], gates)
        operator._dispatch_cache.clear()  # it caches the rule
        decomposition_table[operator] = _shapes_or(decomposition_table[operator], gates)


def _shapes_or(rule: Callable[..., Any], gates: int) -> Callable[..., Any]:
    @functools.wraps(rule)
    def either(*arguments: Any) -> Any:
        is_here = getattr(_here, "depth", 0) > 0
        # Real tensors that are computed during capture need torch's own rule.
        if not is_here or not is_fake(arguments[0]) or not _is_plain(gates, *arguments):
            return rule(*arguments)
        return _shapes(*arguments)

    return either


def _is_plain(
    gates: int,
    x: torch.Tensor,
    initial: Any,
    weights: Any,
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> bool:
    """Whether the call cannot fail and is not random; otherwise torch's own rule decides."""
    states = [initial] if isinstance(initial, torch.Tensor) else list(initial)
    if x.dim() != 3 or (train and dropout > 0):
        return False
    batch, directions = x.shape[0 if batch_first else 1], 2 if both else 1
    # The states of an LSTM may be projected, its cells are not.
    shown, hidden = states[0].shape[-1], states[-1].shape[-1]
    of_one = [[gates * hidden, 0], [gates * hidden, shown]]
    of_one += [[gates * hidden]] * 2 if has_biases else []
    of_one += [[shown, hidden]] if shown != hidden else []
    expected: list[list[int]] = []
    for layer in range(layers):
        of_one[0] = [gates * hidden, x.shape[2] if layer == 0 else directions * shown]
        expected += list(of_one) * directions
    return [list(weight.shape) for weight in weights] == expected and all(
        list(state.shape[:-1]) == [layers * directions, batch] and state.dtype == x.dtype
        for state in states
    )


def _shapes(x: torch.Tensor, initial: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    """Results with the shapes and strides of torch's rule, which transposes batches at the end."""
    states = [initial] if isinstance(initial, torch.Tensor) else list(initial)
    both, batch_first = rest[-2:]
    first, second, _ = x.shape
    features = states[0].shape[-1] * (2 if both else 1)
    if batch_first:
        steps = x.new_empty(second, first, features).transpose(0, 1)
    else:
        steps = x.new_empty(first, second, features)
    return steps, *(x.new_empty(state.shape) for state in states)
