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
from tvmify.dispatch.hints import hints_of_class
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
from tvmify.errors import NotCompiled
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
        shapes = artifact.shapes
        why = "it names none" if shapes is None else shapes.why_not(sizes_of(request.leaves))
        if why is not None:
            raise Unserved(f"the program for any sizes does not serve this call: {why}", "Nothing.")


class Unserved(NotCompiled):
    """A program for any sizes does not serve the sizes of a call."""


class Specialised(NotCompiled):
    """As it is recorded, a program becomes one for the sizes of the call alone.

    It may be otherwise for the next call: a part of a size that becomes 1 is a number, too.
    """


class Sizes:
    """Which sizes of calls were seen to vary, and the programs that serve them.

    Parameters
    ----------
    dynamic
        The option: True for symbols at the first call, False for none, None for the second.
    known
        `Subject.symbols`: if it is given, these sizes are symbols, and no others.
    """

    keeps_exact = True

    def __init__(self, dynamic: bool | None, known: Symbols | None = None) -> None:
        self._dynamic = dynamic
        self._known = known
        # Of the calls that share all but their sizes.
        self._seen: dict[Hashable, list[TensorSizes]] = {}
        self._programs: dict[SizesOpen, ShapeGuard] = {}
        # What is compiled for one shape each: its sizes decide on more than shapes.
        self._static: dict[tuple[Hashable, Hashable], NotCompiled] = {}

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
        if self._are_enough():
            return None
        if self._known is not None:
            varying = Varying(from_two(self._known, sizes))
        else:
            varying = varying_of(seen, request, is_first=self._dynamic is True)
        return self._any(request, rest, varying) if varying.axes else None

    def narrower(self, request: Request, general: AnySizes, reason: NotCompiled) -> AnySizes | None:
        """Ask for another program of the same sizes, recorded with those of this call."""
        variant = general.varying.variant + 1
        if not isinstance(reason, Unserved) or variant >= MOST_PROGRAMS:
            return None
        varying = replace(general.varying, variant=variant)
        return self._any(request, general.signature.rest, varying)

    def accept(self, general: AnySizes, outcome: Outcome) -> None:
        """Learn what a program serves."""
        shapes = outcome.facts.shapes
        if shapes is not None:
            self._programs[general.signature] = ShapeGuard(shapes)

    def refuse(self, request: Request, general: AnySizes, reason: NotCompiled) -> None:
        """Learn that such calls are compiled for one shape each."""
        _LOG.debug("%s: a program for this shape, since %s", request.title, reason)
        if not isinstance(reason, Specialised):
            self._static[general.signature.rest, _said(request)] = reason

    def made_with(self, request: Request) -> list[AnySizes]:
        """Ask for the programs for sizes like those of one that serves a call, without gradients.

        None of them is missing: these are what was made, for all classes of sizes.
        """
        rest, leaves = _rest(request).rest, request.leaves
        known = {s: g.shapes for s, g in self._programs.items() if s.rest.rest == rest}
        serving = [known[s].leaves for s in known if self._programs[s].serves(leaves)]
        return [
            AnySizes(signature, *request.call)
            for signature, shapes in known.items()
            if serving and shapes.leaves == serving[0]
        ]

    def forget(self) -> None:
        """Forget what was learnt."""
        self._seen.clear()
        self._programs.clear()
        self._static.clear()

    def _are_enough(self) -> bool:
        return len({(s.rest.rest, s.varying) for s in self._programs}) >= MOST_PROGRAMS

    def _with_other_gradients(self, request: Request, rest: _Rest) -> AnySizes | None:
        """Ask for a program that serves such calls in other modes of gradients."""
        for signature, guard in self._programs.items():
            if signature.rest.rest == rest.rest and self._suits(signature, guard, request):
                return AnySizes(SizesOpen(rest, signature.varying), *request.call)
        return None

    @staticmethod
    def _suits(signature: SizesOpen, guard: ShapeGuard, request: Request) -> bool:
        """Whether a program serves a call, and is of its class of sizes."""
        if not may_vary(signature.varying, request):
            return False
        return guard.serves(request.leaves) and _tuned(signature.varying, request) == (
            signature.varying
        )

    def _any(self, request: Request, rest: _Rest, varying: Varying) -> AnySizes:
        return AnySizes(SizesOpen(rest, _tuned(varying, request)), *request.call)


def _tuned(varying: Varying, request: Request) -> Varying:
    """Return it with the hints of the class that a call is of."""
    sizes = sizes_of(request.leaves)
    values = {
        name: size
        for leaf, names in varying.axes.items()
        for name, size in zip(names, sizes[leaf] or (), strict=True)
        if name is not None
    }
    open_ = {n: size for n, size in values.items() if n not in varying.typical}
    hints = hints_of_class(open_, sides=_sides(varying.axes))
    hints |= varying.typical
    for name, (least, most) in varying.limits.items():
        hints[name] = min(max(hints[name], least), most)
    return replace(varying, hints=hints)


def _sides(axes: Symbols) -> frozenset[str]:
    """Return the symbols that are height and width of images."""
    pairs = (names[2:] for names in axes.values() if len(names) == 4)
    return frozenset(name for pair in pairs if all(pair) for name in pair if name is not None)


def _said(request: Request) -> Hashable:
    return tuple(sorted(request.declared.items(), key=lambda item: item[0]))


def _rest(request: Request) -> _Rest:
    signature = request.signature
    leaves = tuple(
        (leaf.dtype, leaf.device, len(leaf.shape)) if isinstance(leaf, TensorSpec) else leaf
        for leaf in signature.leaves
    )
    modes, gradients = request.modes
    repeated = tuple(request.repeated.items())
    return _Rest((signature.structure, leaves, modes, request.autocast, repeated), gradients)


def _is_on_gpu(request: Request) -> bool:
    return any(device.type != "cpu" for device in request.signature.devices)
