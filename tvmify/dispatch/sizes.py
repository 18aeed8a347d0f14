"""Calls that differ in the sizes of tensors alone, and what serves all of them.

The first call with sizes of its own is compiled for these. When a second differs in nothing else,
the sizes that differ become symbols, and one program serves all calls of that kind that its guards
allow. Sizes 0 and 1 stay numbers, since programs know more of them.

Kernels are tuned for one size, and serve others a little slower the farther these are away. So
there are a few programs, one for each class of sizes, of the same recording.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from tvmify.artifact import Artifact
from tvmify.artifact.shapes import Shapes
from tvmify.capture import Varying
from tvmify.dispatch.outcome import Outcome, Run
from tvmify.dispatch.request import Request
from tvmify.errors import NotCompiled
from tvmify.runtime import ShapeGuard
from tvmify.signature import TensorSpec

_LOG = logging.getLogger(__name__)

#: The products of all symbols up to which a program of each class is used, and the product that
#: it is tuned for. Measured on matrix products of so many rows: docs/measurements/shapes.md.
CLASSES = ((16, 16), (64, 48), (256, 128), (2**62, 512))
#: A module whose calls need more programs than this is not compiled for ever.
MOST_PROGRAMS = 8
#: So many calls are compared to see which sizes are equal in all of them.
_REMEMBERED = 8

#: For each axis of tensors among the leaves of a call the name of a symbol, or None.
_Symbols = Mapping[int, tuple[str | None, ...]]
#: The sizes of each tensor among the leaves of a call, None for other leaves.
_Sizes = tuple[tuple[int, ...] | None, ...]


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
        shapes = artifact.shapes
        why = "it names none" if shapes is None else shapes.why_not(_sizes(request.leaves))
        if why is not None:
            raise Unserved(f"the program for any sizes does not serve this call: {why}", "Nothing.")
        return run


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

    def __init__(self, dynamic: bool | None, known: _Symbols | None = None) -> None:
        self._dynamic = dynamic
        self._known = known
        # Of the calls that share all but their sizes.
        self._seen: dict[Hashable, list[_Sizes]] = {}
        self._programs: dict[SizesOpen, ShapeGuard] = {}
        # What is compiled for one shape each: its sizes decide on more than shapes.
        self._static: dict[Hashable, NotCompiled] = {}

    def serves_any(self) -> bool:
        """Whether there is a program for any sizes."""
        return bool(self._programs)

    def served(self, request: Request) -> SizesOpen | None:
        """Return the signature of a program that serves a call already."""
        leaves, rest = request.leaves, _rest(request)
        found = None
        for signature, guard in self._programs.items():
            if signature.rest == rest and (values := guard.solve(leaves)) is not None:
                if guard.shapes.hints == _hints(guard.shapes, _class_of(values)):
                    return signature
                found = found or signature
        # Another class serves all the same, where no more programs are to be made.
        return found if len(self._programs) >= MOST_PROGRAMS else None

    def general(self, request: Request) -> AnySizes | None:
        """Leave open the sizes that were seen to vary."""
        sizes, rest = _sizes(request.leaves), _rest(request)
        is_static = not self._known if self._known is not None else self._dynamic is False
        if is_static or rest in self._static or _is_on_gpu(request):
            return None
        seen = self._seen.setdefault(rest, [])
        if sizes not in seen:
            seen.append(sizes)
            del seen[1:-_REMEMBERED]  # the first stays
        if len(self._programs) >= MOST_PROGRAMS:
            return None
        if self._known is not None:
            symbols = _from_two(self._known, sizes)
        else:
            symbols = _symbols(seen, sizes, is_first=self._dynamic is True)
        if not symbols:
            return None
        return self._any(request, rest, symbols, variant=0)

    def narrower(self, request: Request, general: AnySizes, reason: NotCompiled) -> AnySizes | None:
        """Ask for another program of the same sizes, recorded with those of this call."""
        variant = general.varying.variant + 1
        if not isinstance(reason, Unserved) or variant >= MOST_PROGRAMS:
            return None
        return self._any(request, general.signature.rest, dict(general.varying.axes), variant)

    def accept(self, general: AnySizes, outcome: Outcome) -> None:
        """Learn what a program serves."""
        shapes = outcome.facts.shapes
        if shapes is not None:
            self._programs[general.signature] = ShapeGuard(shapes)

    def refuse(self, request: Request, general: AnySizes, reason: NotCompiled) -> None:
        """Learn that such calls are compiled for one shape each."""
        _LOG.debug("%s: a program for this shape, since %s", request.title, reason)
        if not isinstance(reason, Specialised):
            self._static[general.signature.rest] = reason

    def of_file(self, request: Request) -> list[AnySizes]:
        """Ask for all programs of the same sizes as one that serves a call, without gradients."""
        rest, leaves = _rest(request).rest, request.leaves
        known = {s: g.shapes for s, g in self._programs.items() if s.rest.rest == rest}
        serving = [known[s].leaves for s in known if self._programs[s].serves(leaves)]
        if not serving:
            general = self.general(request) if self._dynamic is True else None
            return [] if general is None else [general]
        return [
            AnySizes(signature, *request.call)
            for signature, shapes in known.items()
            if shapes.leaves == serving[0]
        ]

    def forget(self) -> None:
        """Forget what was learnt."""
        self._seen.clear()
        self._programs.clear()
        self._static.clear()

    def _any(
        self,
        request: Request,
        rest: _Rest,
        symbols: _Symbols,
        variant: int,
    ) -> AnySizes:
        sizes = _sizes(request.leaves)
        values = {
            name: size
            for leaf, names in symbols.items()
            for name, size in zip(names, sizes[leaf] or (), strict=True)
            if name is not None
        }
        hints = _spread(_class_of(values.values()), list(values))
        varying = Varying(symbols, hints=hints, variant=variant)
        return AnySizes(SizesOpen(rest, varying), *request.call)


def _symbols(seen: Sequence[_Sizes], sizes: _Sizes, *, is_first: bool) -> _Symbols:
    """Return a name for each size that varies: one for those that were equal in all calls."""
    names: dict[tuple[int, ...], str] = {}

    def name_of(leaf: int, axis: int, size: int) -> str | None:
        history = tuple((other[leaf] or ())[axis] for other in seen)
        if size < 2 or (len(set(history)) == 1 and not is_first):
            return None
        # Sizes of one call are often equal by chance.
        same: tuple[int, ...] = history if len(seen) > 1 else (leaf, axis)
        return names.setdefault(same, f"s{len(names)}")

    found = {
        leaf: tuple(name_of(leaf, axis, size) for axis, size in enumerate(shape))
        for leaf, shape in enumerate(sizes)
        if shape is not None
    }
    return {leaf: shape for leaf, shape in found.items() if any(shape)}


def _from_two(known: _Symbols, sizes: _Sizes) -> _Symbols:
    """Return the known symbols, without those whose sizes are numbers in every program."""
    small = {
        name
        for leaf, names in known.items()
        for name, size in zip(names, sizes[leaf] or (), strict=True)
        if size < 2
    }
    found = {leaf: tuple(None if n in small else n for n in names) for leaf, names in known.items()}
    return {leaf: names for leaf, names in found.items() if any(names)}


def _class_of(values: Any) -> int:
    """Return what the class of a call is tuned for."""
    count = prod(values)
    return next(hint for most, hint in CLASSES if count <= most)


def _spread(hint: int, names: Sequence[str]) -> dict[str, int]:
    """Return a value for each symbol, of which the product is about the hint.

    The last gets most of it, which is the length of sequences.
    """
    if len(names) == 1:
        return {names[0]: hint}
    smallest = 2 if hint <= 64 else 4
    rest = max(2, hint // smallest ** (len(names) - 1))
    return dict.fromkeys(names[:-1], smallest) | {names[-1]: rest}


def _hints(shapes: Shapes, hint: int) -> tuple[int, ...]:
    """Return the hints that a program of a class has, which lie within its ranges."""
    spread = _spread(hint, [symbol.name for symbol in shapes.symbols])
    return tuple(min(max(spread[s.name], s.lower), s.upper) for s in shapes.symbols)


def _sizes(leaves: Sequence[Any]) -> _Sizes:
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves)


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
