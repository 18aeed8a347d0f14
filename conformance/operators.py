"""PyTorch's operator samples as modules, run through the decorator and compared with eager."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import DecorateInfo, OpInfo
from torch.utils import _pytree as pytree

from conformance.comparison import Different, compare
from tvmify import tvmify
from tvmify.decorate.decorated import dispatcher_of
from tvmify.dispatch.outcome import Compiled

DTYPES = {
    name: getattr(torch, name)
    for name in """
    float32 int64 float64 float16 bfloat16 complex64 complex128 int32 int16 int8 uint8 bool
    """.split()
}
#: The dtypes of docs/coverage.md.
DEFAULT_DTYPES = ("float32", "int64")
COMPILED, BRIDGED, EAGER, WRONG, CRASHED = "compiled", "bridged", "eager", "wrong", "crashed"
OUTCOMES = (COMPILED, BRIDGED, EAGER, WRONG, CRASHED)
#: Operators that return uninitialized memory: only shape and dtype can be compared.
UNDEFINED = frozenset(
    """
    empty empty_like empty_permuted empty_strided new_empty new_empty_strided
    resize_ resize_as_
    """.split()
)
#: The tolerances of `torch.testing.assert_close`: relative, absolute.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
_TENSOR = object()


@dataclass(frozen=True, order=True)
class Case:
    """One sample of an operator: its name and variant in ``op_db``, a dtype and a number."""

    operator: str
    variant: str
    dtype: str
    sample: int

    def __str__(self) -> str:
        return f"{self.operator} {self.variant or '-'} {self.dtype} {self.sample}"

    @classmethod
    def parse(cls, line: str) -> Case:
        """Parse the result of `str`."""
        operator, variant, dtype, sample = line.split()
        return cls(operator, "" if variant == "-" else variant, dtype, int(sample))


@dataclass
class Result:
    """How a case ended.

    Attributes
    ----------
    outcome
        One of `OUTCOMES`.
    kind, reason
        Class and text of the reason why it ran in eager, or the difference if it is wrong.
    operators
        The ATen operators that caused it, or that were bridged.
    """

    outcome: str
    kind: str = ""
    reason: str = ""
    operators: list[str] = field(default_factory=list)


class Applied(nn.Module):
    """An operator as a module: tensors are arguments of the call, other arguments are fixed."""

    def __init__(self, function: Callable[..., Any], arguments: Any) -> None:
        super().__init__()
        leaves, self.structure = pytree.tree_flatten(arguments)
        self.function = function
        self.leaves = tuple(_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves)

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Put the tensors in their places and call the operator."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.function(*args, **kwargs)


class Operator:
    """One entry of ``op_db`` with one dtype, whose samples are run one after the other.

    Compiled code lives as long as this object, so that samples with equal programs share it.
    """

    def __init__(self, info: OpInfo, dtype: str) -> None:
        self.info, self.dtype = info, dtype
        self._keep_alive: list[nn.Module] = []

    def case(self, sample: int) -> Case:
        """Return the case of one of its samples."""
        return Case(self.info.name, self.info.variant_test_name, self.dtype, sample)

    def samples(self) -> Iterator[tuple[Case, Any]]:
        """Yield the case and the arguments of each sample, the same every time."""
        _seed()
        inputs = self.info.sample_inputs("cpu", DTYPES[self.dtype], requires_grad=False)
        for number, sample in enumerate(inputs):
            # Running a sample draws random numbers, too.
            state = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
            yield self.case(number), ((sample.input, *sample.args), sample.kwargs)
            torch.set_rng_state(state[0])
            random.setstate(state[1])
            np.random.set_state(state[2])  # noqa: NPY002

    def run(self, arguments: Any) -> Result:
        """Run a sample in eager and through the decorator, twice, and compare."""
        module = Applied(self.info.op, arguments).eval()
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        compiled = tvmify(module, compare=False, cache=False, progress=False)
        self._keep_alive.append(compiled)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = _outcome(module, tensors)
            for call in ("", "in the second call, "):  # the second one uses the memory cache
                actual = _outcome(compiled, tensors)
                difference = self.difference(actual, expected)
                if difference and not is_rounding(actual, expected, module, tensors):
                    return Result(WRONG, reason=call + difference)
        return where_it_ran(compiled)

    def difference(self, actual: Any, expected: Any) -> str:
        """Describe how a result or an error differs from the expected one; empty if it does not."""
        if isinstance(actual, Exception) or isinstance(expected, Exception):
            same = type(actual) is type(expected)
            return "" if same else f"{_brief(actual)} instead of {_brief(expected)}"
        got, got_structure = pytree.tree_flatten(actual)
        want, structure = pytree.tree_flatten(expected)
        if got_structure != structure:
            return f"{got_structure} instead of {structure}"
        for one, other in zip(got, want, strict=True):
            if type(one) is not type(other):
                return f"{one!r} instead of {other!r}"
            try:
                self._assert_close(one, other)
            except AssertionError as error:
                return " ".join(str(error).split())
        return ""

    def _assert_close(self, got: Any, want: Any) -> None:
        if not isinstance(want, torch.Tensor):
            both_nan = isinstance(want, float) and math.isnan(want) and math.isnan(got)
            assert got == want or both_nan, f"{got!r} instead of {want!r}"
        elif self.info.name in UNDEFINED:
            assert (got.shape, got.dtype) == (want.shape, want.dtype), "another shape or dtype"
        else:
            relative, absolute = self.tolerance(want.dtype)
            torch.testing.assert_close(got, want, rtol=relative, atol=absolute, equal_nan=True)

    def tolerance(self, dtype: torch.dtype) -> tuple[float | None, float | None]:
        """Return the tolerances of PyTorch's own tests of the operator; None for exact dtypes."""
        if dtype not in _TOLERANCES:
            return None, None
        relative, absolute = _TOLERANCES[dtype]
        for decorator in self.info.decorators:
            if isinstance(decorator, DecorateInfo) and decorator.device_type in (None, "cpu"):
                for override in decorator.decorators:
                    if isinstance(override, toleranceOverride) and dtype in override.d:
                        relative = max(relative, override.d[dtype].rtol)
                        absolute = max(absolute, override.d[dtype].atol)
        return relative, absolute


def operators(
    only: frozenset[str] = frozenset(), dtypes: Collection[str] = DEFAULT_DTYPES
) -> list[Operator]:
    """Return all operators, once for each dtype that they support, in the order of ``op_db``.

    Parameters
    ----------
    only
        Names, with or without the variant (``linalg.norm.subgradients_at_zero``); empty for all.
    dtypes
        Names from `DTYPES`.
    """
    return [
        Operator(info, name)
        for info in op_db
        for name in dtypes
        if DTYPES[name] in info.supported_dtypes("cpu")
        and (not only or not only.isdisjoint({info.name, info.full_name}))
    ]


def run_case(case: Case) -> Result:
    """Find a case and run it."""
    for operator in operators(frozenset({case.operator}), (case.dtype,)):
        for found, arguments in operator.samples():
            if found == case:
                return operator.run(arguments)
    raise ValueError(f"op_db has no sample {case}")


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - what op_db draws from


def _outcome(module: nn.Module, tensors: list[torch.Tensor]) -> Any:
    """Return the result and the arguments after the call, or the error."""
    # A deep copy keeps strides and shared memory, but works for strided tensors only.
    memo: dict[int, Any] = {}
    tensors = [
        copy.deepcopy(tensor, memo) if tensor.layout is torch.strided else tensor.clone()
        for tensor in tensors
    ]
    _seed()
    try:
        result = module(*tensors)
    except Exception as error:
        return error
    return result, tensors


def is_rounding(actual: Any, expected: Any, module: nn.Module, tensors: list[torch.Tensor]) -> bool:
    """Whether a result that differs from eager's is as close to float64's as eager's is.

    Sums in another order can differ so, if the terms are large and the sum is small.
    """
    exact = _outcome(module, [tensor.to(_wide(tensor.dtype)) for tensor in tensors])
    if any(isinstance(outcome, Exception) for outcome in (actual, expected, exact)) or any(
        isinstance(leaf, torch.Tensor) and leaf.dtype != _wide(leaf.dtype)
        for leaf in pytree.tree_leaves(exact)
    ):
        return False  # no better reference than eager's
    try:
        compare(actual, expected, exact)
    except Different:
        return False
    return True


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _brief(outcome: Any) -> str:
    return repr(outcome) if isinstance(outcome, Exception) else "a result"


def where_it_ran(compiled: Any) -> Result:
    """Return where the last call of a decorated module ran, and why."""
    outcomes = list(dispatcher_of(compiled).state.memory.values())
    if not outcomes:
        return Result(EAGER, "UnsupportedInput", "its arguments have no signature")
    (outcome,) = outcomes
    if isinstance(outcome, Compiled):
        bridged: list[str] = sorted(outcome.executor.artifact.report.get("bridged", ()))
        return Result(BRIDGED if bridged else COMPILED, operators=bridged)
    assert outcome.reason is not None
    reason = outcome.reason
    names: list[str] = list(getattr(reason, "operators", ()))
    return Result(EAGER, type(reason).__name__, getattr(reason, "detail", reason.reason), names)
