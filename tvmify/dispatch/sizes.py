"""Calls that differ in the sizes of tensors alone, and what serves all of them.

The first call with sizes of its own is compiled for these. When a second differs in nothing else,
the sizes that differ become symbols, and one program serves all calls of that kind that its guards
allow. Sizes 0 and 1 stay numbers, since programs know more of them.

Kernels are tuned for one size, and serve others a little slower the farther these are away. So
there are a few programs, one for each class of sizes, of the same recording.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tvmify.artifact import Artifact
from tvmify.capture import Varying
from tvmify.dispatch.hints import is_tuned, numbers, tuned
from tvmify.dispatch.outcome import Outcome, Run
from tvmify.dispatch.request import Request
from tvmify.dispatch.symbols import (
    Symbols,
    TensorSizes,
    from_two,
    may_vary,
    sizes_of,
    varying_of,
)
from tvmify.errors import CacheMiss, NotCompiled, TracedElsewhere
from tvmify.runtime import ShapeGuard
from tvmify.signature import TensorSpec

_LOG = logging.getLogger(__name__)

#: A module whose calls need more programs than this is not compiled for ever.
MOST_PROGRAMS = 8
#: So many calls are compared to see which sizes are equal in all of them.
_REMEMBERED = 8


class _Rest(NamedTuple):
    """All of a signature but the sizes, and apart from it what concerns gradients alone."""

    rest: Hashable
    gradients: str


@dataclass(frozen=True)
class SizesOpen:
    """A signature without some of its sizes.

    Attributes
    ----------
    rest
        All but the sizes.
    varying
        Which sizes are symbols, and what for.
    """

    rest: _Rest
    varying: Varying


@dataclass(frozen=True)
class AnySizes:
    """The arguments of a call some of whose sizes are symbols.

    Attributes
    ----------
    signature
        What all such calls share.
    args, kwargs
        Those of the call: a program is recorded with its sizes.
    """

    signature: SizesOpen
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def varying(self) -> Varying:
        """The sizes that are symbols."""
        return self.signature.varying

    def adapted(
        self, run: Run, artifact: Artifact, request: Request, eager: Callable[[], Any]
    ) -> Run:
        """Return what runs the program, if it serves the call.

        Raises
        ------
        NotCompiled
            It was recorded for a call of which its guards say another thing.
        """
        self.check(artifact, request)
        return run

    def check(self, artifact: Artifact, request: Request) -> None:
        """Refuse a program that does not serve the call.

        Raises
        ------
        NotCompiled
            It was recorded for a call of which its guards say another thing.
        """
        shapes, sizes = artifact.shapes, sizes_of(request.leaves)
        why = "it names none" if shapes is None else shapes.why_not(sizes)
        if why is not None:
            raise Unserved(f"the program for any sizes does not serve this call: {why}", "Nothing.")
        assert shapes is not None
        fixed = numbers(self.varying, shapes)
        if not fixed.isdisjoint(self.varying.hints) and not is_tuned(
            shapes, tuned(self.varying, sizes, fixed)
        ):
            raise OtherClass(fixed)


class Unserved(NotCompiled):
    """A program for any sizes does not serve the sizes of a call."""


class OtherClass(NotCompiled):
    """A program serves a call, but is tuned for another class of sizes.

    It was made before it was known which symbols are numbers in it.

    Parameters
    ----------
    fixed
        These symbols.
    """

    def __init__(self, fixed: frozenset[str]) -> None:
        super().__init__("the program is tuned for other sizes", "Nothing: another is made.")
        self.fixed = fixed

    def __reduce__(self) -> Any:
        return type(self), (self.fixed,)


class Specialised(NotCompiled):
    """As it is recorded, a program becomes one for the sizes of the call alone.

    It may be otherwise for the next call: a part of a size that becomes 1 is a number, too.
    """

    def __init__(
        self,
        reason: str = "the code asks for these very sizes",
        next_step: str = "Nothing: each has a program.",
    ) -> None:
        super().__init__(reason, next_step)


class Sizes:
    """Which sizes of calls were seen to vary, and the programs that serve them.

    Parameters
    ----------
    dynamic
        The option: True for symbols at the first call, False for none, None for the second.
    known
        `Subject.symbols`: if it is given, these sizes are symbols, and no others.
    """

    def __init__(self, dynamic: bool | None, known: Symbols | None = None) -> None:
        self._dynamic = dynamic
        self._known = known
        # Of the calls that share all but their sizes.
        self._seen: dict[Hashable, list[TensorSizes]] = {}
        self._programs: dict[SizesOpen, ShapeGuard] = {}
        # The symbols that are numbers in programs of such calls.
        self._fixed: dict[SizesOpen, frozenset[str]] = {}
        # What is compiled for one shape each: its sizes decide on more than shapes.
        self._static: dict[tuple[Hashable, Hashable], NotCompiled] = {}
        # What did not compile for the sizes of the last call: with symbols it would not, either.
        self._uncompiled: set[_Rest] = set()

    def alias(self, request: Request) -> Hashable:
        """Return the signature of the call itself: later ones are looked up by it."""
        return request.exact

    def serves_any(self) -> bool:
        """Whether there is a program for any sizes."""
        return bool(self._programs)

    def served(self, request: Request) -> SizesOpen | None:
        """Return the signature of a program that serves a call already."""
        rest = _rest(request)
        known = {s: guard for s, guard in self._programs.items() if s.rest == rest}
        for signature, guard in known.items():
            if self._suits(signature, guard, request):
                return signature
        if not self._are_enough():
            return None
        # Another class serves all the same, where no more programs are to be made.
        serving = (s for s, guard in known.items() if guard.serves(request.leaves))
        return next((s for s in serving if may_vary(s.varying, request)), None)

    def general(self, request: Request) -> AnySizes | None:
        """Leave open the sizes that were seen to vary, or of which that is said."""
        sizes, rest = sizes_of(request.leaves), _rest(request)
        if self._known is not None and not self._known:
            return None
        if (rest, _said(request)) in self._static or _is_on_gpu(request):
            return None
        seen = [sizes] if self._dynamic is False else self._seen.setdefault(rest, [])
        if sizes not in seen:
            seen.append(sizes)
            del seen[1:-_REMEMBERED]  # the first stays
        if (known := self._with_other_gradients(request, rest)) is not None:
            return known
        if self._are_enough() or (rest in self._uncompiled and not request.declared):
            return None
        if self._known is not None:
            varying = Varying(from_two(self._known, sizes))
        else:
            varying = varying_of(seen, request, is_first=self._dynamic is True)
        return self._any(request, rest, varying) if varying.axes else None

    def narrower(self, request: Request, general: AnySizes, reason: NotCompiled) -> AnySizes | None:
        """Ask for another program of the same sizes, recorded with those of this call."""
        rest, varying = general.signature.rest, general.varying
        if isinstance(reason, OtherClass):
            self._fixed[SizesOpen(rest, varying.recorded())] = reason.fixed
            return self._any(request, rest, varying)
        variant = varying.variant + 1
        if not isinstance(reason, Unserved) or variant >= MOST_PROGRAMS:
            return None
        return self._any(request, rest, replace(varying, variant=variant))

    def accept(self, general: AnySizes, outcome: Outcome) -> None:
        """Learn what a program serves."""
        shapes, signature = outcome.facts.shapes, general.signature
        if shapes is not None:
            self._programs[signature] = ShapeGuard(shapes)
            place = SizesOpen(signature.rest, signature.varying.recorded())
            self._fixed[place] = numbers(signature.varying, shapes)

    def refuse(self, request: Request, general: AnySizes, reason: NotCompiled) -> None:
        """Learn that such calls are compiled for one shape each."""
        _LOG.debug("%s: a program for this shape, since %s", request.title, reason)
        if not isinstance(reason, Specialised):
            self._static[general.signature.rest, _said(request)] = reason

    def note(self, request: Request, outcome: Outcome) -> None:
        """Learn whether such calls compile at all."""
        rest = _rest(request)
        if outcome.reason is None:
            self._uncompiled.discard(rest)
        elif not isinstance(outcome.reason, (CacheMiss, TracedElsewhere)):  # which pass
            self._uncompiled.add(rest)

    def made_with(self, request: Request) -> list[AnySizes]:
        """Ask for the programs for sizes like those of one that serves a call, without gradients.

        None of them is missing: these are what was made, for all classes of sizes.
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
        """Forget what was learnt."""
        self._seen.clear()
        self._programs.clear()
        self._fixed.clear()
        self._static.clear()
        self._uncompiled.clear()

    def _are_enough(self) -> bool:
        return len({(s.rest.rest, s.varying) for s in self._programs}) >= MOST_PROGRAMS

    def _with_other_gradients(self, request: Request, rest: _Rest) -> AnySizes | None:
        """Ask for a program that serves such calls in other modes of gradients."""
        for signature, guard in self._programs.items():
            if signature.rest.rest == rest.rest and self._suits(signature, guard, request):
                return AnySizes(SizesOpen(rest, signature.varying), request.args, request.kwargs)
        return None

    def _suits(self, signature: SizesOpen, guard: ShapeGuard, request: Request) -> bool:
        """Whether a program serves a call, and is of its class of sizes."""
        if not may_vary(signature.varying, request) or not guard.serves(request.leaves):
            return False
        wanted = tuned(signature.varying, sizes_of(request.leaves), self._fixed_in(signature))
        return is_tuned(guard.shapes, wanted)

    def _fixed_in(self, signature: SizesOpen) -> frozenset[str]:
        place = SizesOpen(signature.rest, signature.varying.recorded())
        return self._fixed.get(place, frozenset())

    def _any(self, request: Request, rest: _Rest, varying: Varying) -> AnySizes:
        fixed = self._fixed_in(SizesOpen(rest, varying))
        wanted = SizesOpen(rest, tuned(varying, sizes_of(request.leaves), fixed))
        place = SizesOpen(rest, varying.recorded())
        for made, guard in self._programs.items():
            # One that was made before it was known which symbols are numbers has other hints.
            is_alike = SizesOpen(made.rest, made.varying.recorded()) == place
            if is_alike and is_tuned(guard.shapes, wanted.varying):
                wanted = made
        return AnySizes(wanted, request.args, request.kwargs)


def _said(request: Request) -> Hashable:
    return tuple(sorted(request.declared.items(), key=lambda item: item[0]))


def _rest(request: Request) -> _Rest:
    signature = request.signature
    leaves = tuple(
        (leaf.dtype, leaf.device, len(leaf.shape)) if isinstance(leaf, TensorSpec) else leaf
        for leaf in signature.leaves
    )
    repeated = tuple(request.repeated.items())
    rest = signature.structure, leaves, request.modes, request.autocast, repeated
    return _Rest(rest, request.gradients)


def _is_on_gpu(request: Request) -> bool:
    return any(device.type != "cpu" for device in request.signature.devices)
