"""Calls of a module whose control flow TorchScript interprets: each region is dispatched by itself.

The driver (`tvmify.capture.driver`) calls one operator, ``tvmify::region``, with the number of a
region. What the region computes is then a call like any other: compiled when its shapes are first
seen, and run in eager PyTorch where that is not possible.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmify.capture import REGION_SCHEMA, Driver, Part, drive
from tvmify.explanation import CacheInfo
from tvmify.errors import CaptureError, GradientsNeeded, NotCompiled, UnsupportedOperator

#: Makes what runs the calls of a region; takes its name, its part and its eager function.
MakeDispatcher = Callable[[str, Part, Callable[..., Any]], Any]

#: Why a region computes further shapes in eager PyTorch.
TOO_MANY = NotCompiled(
    "it was called with more signatures than cache_size",
    "Raise cache_size, if there are not many more: each of them is compiled.",
)

_NUMBERS = itertools.count(1)
_REGIONS: weakref.WeakValueDictionary[int, _Region] = weakref.WeakValueDictionary()
#: The error that a region raised, which TorchScript passes on as nothing but text.
_RAISED = threading.local()


class Driven:
    """One module or function, run by a driver.

    Parameters
    ----------
    name
        Of the module or function.
    callable_
        What `tvmify.capture.drive` takes.
    reason
        Why the whole is not one program.
    dispatcher
        Makes the dispatcher of a region.

    Attributes
    ----------
    reason
        As given.

    Raises
    ------
    NotCompiled
        Nothing of it can run compiled this way.
    """

    def __init__(
        self, name: str, callable_: Any, reason: NotCompiled, dispatcher: MakeDispatcher
    ) -> None:
        self.reason = reason
        self._driver = driver = drive(callable_, _NUMBERS.__next__)
        self._is_scripted = isinstance(
            callable_, (torch.jit.ScriptModule, torch.jit.ScriptFunction)
        )
        self._regions = []
        for place, (number, part) in enumerate(driver.parts.items(), 1):
            region = _Region(f"{name}, region {place}", driver, part, dispatcher)
            self._regions.append(region)
            _REGIONS[number] = region

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call; what a region raises reaches the caller."""
        _RAISED.error = None
        try:
            # who wants gradients gets them otherwise: see `check`
            with torch.no_grad():
                return self._driver(args, kwargs)
        except RuntimeError as text:
            error, _RAISED.error = _RAISED.error, None
            if error is None:
                raise
            raise error from text

    def check(
        self,
        eager: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        differentiable: bool,
    ) -> None:
        """Refuse a call that would not be the same as in eager PyTorch.

        TorchScript has fewer types than Python, and may take other branches. A plain module is
        therefore run both ways, once for each signature.

        Raises
        ------
        NotCompiled
            It returns something else than eager does, or somebody might want gradients of effects.
        """
        if differentiable and self._driver.has_effects:
            raise GradientsNeeded(
                "weights require gradients, and the module changes its state",
                "Call under torch.no_grad() or torch.inference_mode().",
            )
        if self._is_scripted:
            return
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            expected = eager()
        with torch.random.fork_rng(devices=[]):
            result = self(args, kwargs)
        if _kinds(result) != _kinds(expected):
            raise CaptureError(
                "TorchScript returns something else than eager PyTorch",
                "Look for torch.jit.is_scripting() and for types that TorchScript does not have.",
            )

    def bind(self, module: Any) -> list[torch.Tensor]:
        """Take the present tensors of the module, and return them."""
        return self._driver.bind(module)

    def cache_infos(self) -> list[CacheInfo]:
        """Return what the caches of each region have done."""
        return [region.dispatcher.cache_info() for region in self._regions]

    def explain(self) -> list[str]:
        """Return lines that say what is in each region, and where it runs."""
        lines = []
        for region in self._regions:
            operators = ", ".join(f"{n} {name}" for name, n in sorted(region.operators.items()))
            lines += ["", f"  a region of {region.operators.total()} operators: {operators}"]
            lines += [f"  {line}" for line in region.dispatcher.explain().splitlines()]
        return lines


class _Region:
    """Calls of one region."""

    def __init__(
        self, name: str, driver: Driver, part: Part, dispatcher: MakeDispatcher
    ) -> None:
        self.operators = part.operators
        self._booleans = part.booleans
        self._carrier = part.carrier  # which the dispatcher does not keep alive
        self.dispatcher = dispatcher(name, part, driver.in_eager(part))

    def __call__(
        self, tensors: Sequence[torch.Tensor], integers: list[Any], floats: Sequence[float]
    ) -> list[torch.Tensor]:
        for place in self._booleans:
            integers[place] = bool(integers[place])
        try:
            return list(self.dispatcher((*tensors, *integers, *floats), {}))
        except BaseException as error:
            _RAISED.error = error
            raise


def _kinds(result: Any) -> Any:
    """Return what two results have to have in common: structure, types, shapes and dtypes."""
    leaves, structure = pytree.tree_flatten(result)
    return structure, [
        (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in leaves
    ]


def is_about_flow(reason: NotCompiled) -> bool:
    """Tell whether it is control flow, or state, that keeps the whole from being one program."""
    if isinstance(reason, UnsupportedOperator):
        return "prim::SetAttr" in reason.operators
    return isinstance(reason, CaptureError)


def _run_region(
    number: int, tensors: list[torch.Tensor], integers: list[int], floats: list[float]
) -> list[torch.Tensor]:
    return _REGIONS[number](tensors, integers, floats)


_LIBRARY = torch.library.Library("tvmify", "FRAGMENT")
_LIBRARY.define(REGION_SCHEMA)
_LIBRARY.impl("region", _run_region, "CompositeExplicitAutograd")
