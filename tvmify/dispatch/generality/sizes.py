"""Programs that serve calls with tensors of different sizes.

The first call is compiled for its sizes. When a later call differs only in sizes, those that differ
become symbols, and one program serves all such calls that its guards allow. Sizes 0 and 1 stay
constants, because programs can make use of them.

A kernel is tuned for one size, and is slower for sizes far from it. So the same recording is built
into a few programs, one for each class of sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tvmify.artifact import Artifact
from tvmify.capture import Symbols, TensorSizes, Varying, sizes_of
from tvmify.dispatch.generality.hints import TYPICAL_CACHE, is_tuned, numbers, tuned
from tvmify.dispatch.generality.symbols import (
    cache_lengths,
    from_two,
    joined,
    may_vary,
    varying_of,
)
from tvmify.dispatch.outcome import Outcome, Run
from tvmify.dispatch.request import Request
from tvmify.errors import (
    BuildError,
    CacheMiss,
    NotCompiled,
    TracedElsewhere,
    UnsupportedOperator,
)
from tvmify.runtime import ShapeGuard
from tvmify.signature import Args, IntSpec, Kwargs, TensorSpec

_LOG = logging.getLogger(__name__)

#: The most programs with symbolic sizes for calls of a module that differ only in sizes.
MOST_PROGRAMS = 8
#: How many calls are remembered, to see which sizes are equal in all of them.
_REMEMBERED = 8


class _Rest(NamedTuple):
    """A signature without its sizes; the modes that concern gradients are separate."""

    rest: Hashable
    gradients: str


@dataclass(frozen=True)
class SizesOpen:
    """A signature without some of its sizes.

    Attributes
    ----------
    rest
        Everything but the sizes.
    varying
        Which sizes are symbols.
    others
        The sizes that are not: for each tensor its shape, with None for symbols.
    """

    rest: _Rest
    varying: Varying
    others: tuple[tuple[int | None, ...], ...]

    @classmethod
    def of(cls, request: Request, rest: _Rest, varying: Varying) -> SizesOpen:
        """Return the signature of a call with these symbols."""
        shapes = (
            (shape, varying.axes.get(leaf, (None,) * len(shape)))
            for leaf, shape in enumerate(sizes_of(request.leaves))
            if shape is not None
        )
        others = tuple(
            tuple(size if name is None else None for size, name in zip(shape, names, strict=True))
            for shape, names in shapes
        )
        return cls(rest, varying, others)

    def recorded(self) -> SizesOpen:
        """Return what a recording depends on, as `Varying.recorded`."""
        return replace(self, varying=self.varying.recorded())


@dataclass(frozen=True)
class AnySizes:
    """The arguments of a call, with symbols for some of its sizes.

    Attributes
    ----------
    signature
        The signature that all such calls share.
    args, kwargs
        The arguments of the call: the program is recorded with its sizes.
    of_any_class
        Whether it may be tuned for another class of sizes.
    """

    signature: SizesOpen
    args: Args
    kwargs: Kwargs
    of_any_class: bool = False

    @property
    def varying(self) -> Varying:
        """The sizes that are symbols."""
        return self.signature.varying

    def adapted(
        self,
        run: Run,
        artifact: Artifact,
        request: Request,
        eager: Callable[[], Any],
        written: Sequence[torch.Tensor],
    ) -> Run:
        """Return what runs the program, if it serves the call.

        Raises
        ------
        NotCompiled
            Its guards refuse the sizes of the call.
        """
        self.check(artifact, request)
        return run

    def check(self, artifact: Artifact, request: Request) -> None:
        """Refuse a program that does not serve the call.

        Raises
        ------
        NotCompiled
            Its guards refuse the sizes of the call.
        """
        shapes, sizes = artifact.shapes, sizes_of(request.leaves)
        why = "it describes no shapes" if shapes is None else shapes.why_not(sizes)
        if why is not None:
            raise Unserved(
                f"the symbolic program does not serve this call: {why}",
                "Nothing to do: another program serves it.",
            )
        if self.of_any_class:
            return
        assert shapes is not None
        fixed = numbers(self.varying, shapes)
        if not fixed.isdisjoint(self.varying.hints) and not is_tuned(
            shapes, tuned(self.varying, sizes, fixed)
        ):
            raise OtherClass(fixed)


class Unserved(NotCompiled):
    """A program with symbolic sizes does not serve the sizes of a call."""


class OtherClass(NotCompiled):
    """A program serves a call, but is tuned for another class of sizes.

    It was built before it was known which symbols are constants in it.

    Parameters
    ----------
    fixed
        These symbols.
    """

    def __init__(self, fixed: frozenset[str]) -> None:
        super().__init__(
            "the program is tuned for other sizes", "Nothing to do: another one is built."
        )
        self.fixed = fixed

    def __reduce__(self) -> Any:
        return type(self), (self.fixed,)


class Specialized(NotCompiled):
    """The recording of a program left no size symbolic, so it serves the sizes of its call only.

    The next call may have another result: for example, a part of a size was 1, a constant.
    """

    def __init__(
        self,
        reason: str = "forward depends on the values of its sizes",
        next_step: str = "Nothing to do: each shape has its own program.",
    ) -> None:
        super().__init__(reason, next_step)


class Sizes:
    """Which sizes vary between calls, and the programs with symbolic sizes.

    Parameters
    ----------
    dynamic
        The option of that name.
    known
        `Subject.symbols`. If it is given, exactly these sizes are symbols.
    """

    def __init__(self, dynamic: bool | None, known: Symbols | None = None) -> None:
        self._dynamic = dynamic
        self._known = known
        # The sizes of calls that differ in nothing else.
        self._seen: dict[Hashable, list[TensorSizes]] = {}
        self._programs: dict[SizesOpen, ShapeGuard] = {}
        # The symbols that are constants in programs of such calls.
        self._fixed: dict[SizesOpen, frozenset[str]] = {}
        # Recordings that cannot be built for each class of sizes.
        self._untuned: set[SizesOpen] = set()
        # Calls that are compiled for one shape each, and why.
        self._static: dict[tuple[Hashable, Hashable], NotCompiled] = {}
        # Calls that did not compile for their own sizes, so they would not with symbols, either.
        self._uncompiled: set[_Rest] = set()

    def alias(self, request: Request) -> Hashable:
        """Return the exact signature, by which later calls are looked up."""
        return request.exact

    def serves_any(self) -> bool:
        """Whether there is a program with symbolic sizes."""
        return bool(self._programs)

    def served(self, request: Request) -> SizesOpen | None:
        """Return the signature of an existing program that serves a call, or None."""
        rest = _rest(request)
        known = {s: guard for s, guard in self._programs.items() if s.rest == rest}
        for signature, guard in known.items():
            if self._suits(signature, guard, request):
                return signature
        if not self._are_enough(rest):
            return None
        # No more programs are built, so take the program of another class.
        serving = (s for s, guard in known.items() if guard.serves(request.leaves))
        return next((s for s in serving if may_vary(s.varying, request)), None)

    def general(self, request: Request) -> AnySizes | None:
        """Leave open the sizes that vary, or are declared to vary."""
        sizes, rest = sizes_of(request.leaves), _rest(request)
        if self._known is not None and not self._known:
            return None
        if (rest, _declarations(request)) in self._static or _is_on_gpu(request):
            return None
        seen = self._see(sizes, rest)
        if (known := self._with_other_gradients(request, rest)) is not None:
            return known
        if self._are_enough(rest) or (rest in self._uncompiled and not request.declared):
            return None
        if self._known is not None:
            open_ = joined(from_two(self._known, sizes), seen)
            lengths = cache_lengths(open_, sizes)
            varying = Varying(open_, typical=dict.fromkeys(lengths, TYPICAL_CACHE))
        else:
            varying = varying_of(seen, request, is_first=self._dynamic is True)
        return self._any(request, rest, varying) if varying.axes else None

    def narrower(self, request: Request, general: AnySizes, reason: NotCompiled) -> AnySizes | None:
        """Request another program with the same symbols, recorded with the sizes of this call; or
        that of another class, if this one's cannot be built.
        """
        rest, varying = general.signature.rest, general.varying
        if isinstance(reason, (BuildError, UnsupportedOperator)) and not general.of_any_class:
            return self._of_another_class(request, general.signature)
        if isinstance(reason, OtherClass):
            self._fixed[general.signature.recorded()] = reason.fixed
            return self._any(request, rest, varying)
        variant = varying.variant + 1
        if not isinstance(reason, Unserved) or variant >= MOST_PROGRAMS:
            return None
        return self._any(request, rest, replace(varying, variant=variant))

    def accept(self, general: AnySizes, outcome: Outcome) -> None:
        """Learn which sizes a program serves."""
        shapes, signature = outcome.facts.shapes, general.signature
        if shapes is not None:
            self._programs[signature] = ShapeGuard(shapes)
            self._fixed[signature.recorded()] = numbers(signature.varying, shapes)

    def refuse(self, request: Request, general: AnySizes, reason: NotCompiled) -> None:
        """Learn that such calls are compiled for one shape each."""
        _LOG.debug("%s: a program for this shape alone: %s", request.title(), reason)
        if not isinstance(reason, Specialized):
            self._static[general.signature.rest, _declarations(request)] = reason

    def note(self, request: Request, outcome: Outcome) -> None:
        """Learn the sizes of a call, and whether such calls compile at all."""
        rest = _rest(request)
        self._see(sizes_of(request.leaves), rest)
        if outcome.reason is None:
            self._uncompiled.discard(rest)
        elif not isinstance(outcome.reason, (CacheMiss, TracedElsewhere)):  # these are temporary
            self._uncompiled.add(rest)

    def made_with(self, request: Request) -> list[AnySizes]:
        """Return the programs of all classes of sizes like those of a call, without gradients.

        These are the programs that exist already.
        """
        rest, leaves = _rest(request).rest, request.leaves
        known = {s: g.shapes for s, g in self._programs.items() if s.rest.rest == rest}
        serving = [known[s].leaves for s in known if self._programs[s].serves(leaves)]
        return [
            AnySizes(signature, request.args, request.kwargs)
            for signature, shapes in known.items()
            if serving and shapes.leaves == serving[0]
        ]

    def forget(self) -> None:
        """Forget everything that was learnt."""
        self._seen.clear()
        self._programs.clear()
        self._fixed.clear()
        self._untuned.clear()
        self._static.clear()
        self._uncompiled.clear()

    def _see(self, sizes: TensorSizes, rest: _Rest) -> list[TensorSizes]:
        """Remember the sizes of a call, and return those of all such calls."""
        if self._dynamic is False:
            return [sizes]
        seen = self._seen.setdefault(rest, [])
        if sizes not in seen:
            seen.append(sizes)
            del seen[1:-_REMEMBERED]  # keep the first
        return seen

    def _are_enough(self, rest: _Rest) -> bool:
        alike = {(s.varying, s.others) for s in self._programs if s.rest.rest == rest.rest}
        return len(alike) >= MOST_PROGRAMS

    def _with_other_gradients(self, request: Request, rest: _Rest) -> AnySizes | None:
        """Request a program that exists for such calls with other modes of gradients."""
        for signature, guard in self._programs.items():
            if signature.rest.rest == rest.rest and self._suits(signature, guard, request):
                return AnySizes(replace(signature, rest=rest), request.args, request.kwargs)
        return None

    def _suits(self, signature: SizesOpen, guard: ShapeGuard, request: Request) -> bool:
        """Whether a program serves a call, and is tuned for its class of sizes."""
        if not may_vary(signature.varying, request) or not guard.serves(request.leaves):
            return False
        wanted = tuned(signature.varying, sizes_of(request.leaves), self._fixed_in(signature))
        return is_tuned(guard.shapes, wanted) or signature.recorded() in self._untuned

    def _of_another_class(self, request: Request, failed: SizesOpen) -> AnySizes | None:
        """Request a program of the same recording that exists; from now on, it serves any class."""
        for made, guard in self._programs.items():
            if made.recorded() == failed.recorded() and guard.serves(request.leaves):
                self._untuned.add(made.recorded())
                return AnySizes(made, request.args, request.kwargs, of_any_class=True)
        return None

    def _fixed_in(self, signature: SizesOpen) -> frozenset[str]:
        return self._fixed.get(signature.recorded(), frozenset())

    def _any(self, request: Request, rest: _Rest, varying: Varying) -> AnySizes:
        any_hints = SizesOpen.of(request, rest, varying)
        fixed = self._fixed_in(any_hints)
        wanted = replace(any_hints, varying=tuned(varying, sizes_of(request.leaves), fixed))
        for made, guard in self._programs.items():
            # A program from before it was known which symbols are constants has other hints.
            is_alike = made.recorded() == any_hints.recorded()
            if is_alike and is_tuned(guard.shapes, wanted.varying):
                wanted = made
        return AnySizes(wanted, request.args, request.kwargs)


def _declarations(request: Request) -> Hashable:
    return tuple(sorted(request.declared.items(), key=lambda item: item[0]))


def _rest(request: Request) -> _Rest:
    signature = request.signature
    leaves = tuple(
        (isinstance(leaf, IntSpec), leaf.dtype, leaf.device, len(leaf.shape))
        if isinstance(leaf, TensorSpec)
        else leaf
        for leaf in signature.leaves
    )
    repeated = tuple(request.repeated.items())
    rest = signature.structure, leaves, request.modes, request.autocast, repeated
    return _Rest(rest, request.gradients)


def _is_on_gpu(request: Request) -> bool:
    return any(device.type != "cpu" for device in request.signature.devices)
