"""Modules whose control flow depends on values: each region has its own dispatcher.

The driver (`tvmify.capture.regions.driver`) calls a region by number: from Python, or, if the
module is TorchScript, as the operator ``tvmify::region``. It is then a call like any other, which
runs compiled, or in eager PyTorch if it cannot be compiled.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tvmify.cache import Neighbours
from tvmify.capture import REGION_SCHEMA, Part, drive
from tvmify.dispatch.agreement import USE_ALL_DRAWS, is_same_result
from tvmify.dispatch.counts import CacheInfo
from tvmify.dispatch.explanation import ExplainedSubject
from tvmify.dispatch.parts import MakePart, PartCalls
from tvmify.dispatch.subject import Name, Subject
from tvmify.errors import (
    CaptureError,
    NotCompiled,
    UnsupportedInput,
    described,
)
from tvmify.options import CompileOptions
from tvmify.runtime import autocast_text
from tvmify.signature import Args, Kwargs

_DIFFERENT = "Look for torch.jit.is_scripting() and for types that TorchScript does not have."

_NUMBERS = itertools.count(1)
_REGIONS: weakref.WeakValueDictionary[int, _Region] = weakref.WeakValueDictionary()
#: The error that a region raised: TorchScript passes on its text only.
_RAISED = threading.local()


class Driven:
    """Runs a module or function by a driver.

    Parameters
    ----------
    subject
        The module or function.
    reason
        Why the subject is not one program.
    make_part
        Makes the dispatcher of a region.

    Attributes
    ----------
    reason
        As given.
    how
        How the control flow runs, in words.
    has_effects
        Whether a call may have side effects.
    is_random
        Whether it may draw random numbers.
    parts
        Its regions.

    Raises
    ------
    NotCompiled
        No part of it can run compiled this way.
    """

    runs_in_python = False  # the driver has the attributes' values

    def __init__(self, subject: Subject, reason: NotCompiled, make_part: MakePart) -> None:
        self.reason = reason
        callable_ = subject.captured()
        self._driver = driver = drive(callable_, _NUMBERS.__next__, _run_region)
        self.has_effects = driver.has_effects
        self.is_random = driver.is_random
        self._is_scripted = isinstance(
            callable_, (torch.jit.ScriptModule, torch.jit.ScriptFunction)
        )
        runs = "TorchScript" if self._is_scripted else "Python"
        self.how = f"control flow runs in {runs}, and the regions between are compiled separately"
        self.parts: list[_Region] = []
        for number, part in driver.parts.items():
            named = subject.named.numbered(len(self.parts) + 1)
            calls = make_part(_region(named, part, subject.options))
            region = _REGIONS[number] = _Region(calls, part, self._is_scripted)
            self.parts.append(region)

    def __call__(self, args: Args, kwargs: Kwargs, eager: Callable[[], Any]) -> Any:
        """Run one call; errors of regions reach the caller."""
        try:
            values = self._driver.bound(args, kwargs)
        except UnsupportedInput:
            return eager()
        if self._is_scripted:
            return self._run(values)
        generator = torch.get_rng_state() if self._driver.is_random else None
        try:
            return self._run(values)
        except NotCompiled:
            raise
        except Exception:
            # without side effects so far, and eager raises the right error
            if generator is not None:
                torch.set_rng_state(generator)
            return eager()

    def _run(self, values: list[Any]) -> Any:
        _RAISED.error = None
        try:
            # gradients come from eager
            with torch.no_grad():
                return self._driver.run(values)
        except RuntimeError as text:
            error, _RAISED.error = _RAISED.error, None
            if error is None or error is text:
                raise
            raise error from text

    def check(self, eager: Callable[[], Any], args: Args, kwargs: Kwargs) -> None:
        """Refuse a call that would differ from eager PyTorch.

        TorchScript has fewer types than Python, and evaluates some conditions when it compiles. So
        a plain module runs both ways, once for each signature.

        Raises
        ------
        NotCompiled
            The results differ.
        """
        if autocast_text():
            raise CaptureError(
                "TorchScript would run the control flow, whose autocast rules differ from eager's",
                "Leave torch.autocast, or convert the module with .to(dtype).",
            )
        if self._driver.reads_gradient_modes and torch.is_grad_enabled():
            raise CaptureError(
                "forward asks whether gradients are enabled, but TorchScript runs it without them",
                "Call under torch.no_grad() or torch.inference_mode().",
            )
        if self._is_scripted:
            return
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            expected = eager()
            drawn = torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            try:
                result = self._run(self._driver.bound(args, kwargs))
                if not torch.equal(torch.get_rng_state(), drawn):
                    raise CaptureError(
                        "TorchScript does not draw the random numbers that eager PyTorch draws",
                        USE_ALL_DRAWS,
                    )
            except NotCompiled:
                raise
            except Exception as error:
                raise CaptureError(
                    f"run by regions, it raises an error, unlike in eager: {described(error)}",
                    _DIFFERENT,
                ) from error
        if not is_same_result(result, expected):
            raise CaptureError("run by regions, its result differs from eager's", _DIFFERENT)

    def bind(self, module: Any) -> Mapping[str, torch.Tensor]:
        """Take the current tensors of the module, and return them by name."""
        return self._driver.bind(module)


def _region(named: Name, part: Part, options: CompileOptions) -> Subject:
    in_eager = part.in_eager
    return Subject(
        named,
        eager=lambda _, *inputs: in_eager(*inputs),
        capturable=lambda _: part.program,
        options=options,
        module=part.carrier,
        is_part=True,
    )


class _Region:
    """Runs the calls of one region."""

    def __init__(self, calls: PartCalls, part: Part, is_scripted: bool) -> None:
        self._calls = calls
        self._operators = part.operators
        self._is_scripted = is_scripted
        self._booleans = part.booleans
        self._carrier = part.carrier  # its subject does not keep it alive

    def __call__(
        self, tensors: Sequence[torch.Tensor], integers: list[Any], floats: Sequence[float]
    ) -> list[torch.Tensor]:
        for place in self._booleans:
            integers[place] = bool(integers[place])
        if not self._is_scripted and not all(type(number) is float for number in floats):
            raise TypeError("a number is an int where TorchScript's types say float")
        try:
            return list(self._calls((*tensors, *integers, *floats), {}))
        except BaseException as error:
            _RAISED.error = error
            raise

    def cache_info(self) -> CacheInfo:
        """Return the counts of its calls."""
        return self._calls.cache_info()

    def explain(self, neighbours: Neighbours) -> ExplainedSubject:
        """Return how its calls run."""
        explained = self._calls.explain(neighbours)
        return replace(explained, operators=dict(sorted(self._operators.items())))


def _run_region(
    number: int, tensors: list[torch.Tensor], integers: list[int], floats: list[float]
) -> list[torch.Tensor]:
    return _REGIONS[number](tensors, integers, floats)


_LIBRARY = torch.library.Library("tvmify", "FRAGMENT")
_LIBRARY.define(REGION_SCHEMA)
_LIBRARY.impl("region", _run_region, "CompositeExplicitAutograd")
