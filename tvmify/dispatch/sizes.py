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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tvmify.artifact import Artifact
from tvmify.capture import Varying
from tvmify.dispatch.hints import hints_of_class
from tvmify.dispatch.outcome import Outcome, Run
from tvmify.dispatch.request import Request
from tvmify.errors import NotCompiled
from tvmify.runtime import ShapeGuard
from tvmify.signature import TensorSpec
from tvmify.torch_compat.declared_sizes import DeclaredSize

_LOG = logging.getLogger(__name__)

#: A module whose calls need more programs than this is not compiled for ever.
MOST_PROGRAMS = 8
#: So many heights and widths of images have programs of their own before one serves any: that one
#: lacks Winograd's algorithm.
_IMAGE_SIZES = 4
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
        why = "it names none" if shapes is None else shapes.why_not(_sizes(request.leaves))
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

    def __init__(self, dynamic: bool | None, known: _Symbols | None = None) -> None:
        self._dynamic = dynamic
        self._known = known
        # Of the calls that share all but their sizes.
        self._seen: dict[Hashable, list[_Sizes]] = {}
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
        return next((s for s in serving if _may_vary(s.varying, request)), None)

    def general(self, request: Request) -> AnySizes | None:
        """Leave open the sizes that were seen to vary, or of which that is said."""
        sizes, rest = _sizes(request.leaves), _rest(request)
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
            varying = Varying(_from_two(self._known, sizes))
        else:
            varying = _varying(seen, request, is_first=self._dynamic is True)
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
        if not _may_vary(signature.varying, request):
            return False
        return guard.serves(request.leaves) and _tuned(signature.varying, request) == (
            signature.varying
        )

    def _any(self, request: Request, rest: _Rest, varying: Varying) -> AnySizes:
        return AnySizes(SizesOpen(rest, _tuned(varying, request)), *request.call)


def _tuned(varying: Varying, request: Request) -> Varying:
    """Return it with the hints of the class that a call is of."""
    sizes = _sizes(request.leaves)
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


def _sides(axes: _Symbols) -> frozenset[str]:
    """Return the symbols that are height and width of images."""
    pairs = (names[2:] for names in axes.values() if len(names) == 4)
    return frozenset(name for pair in pairs if all(pair) for name in pair if name is not None)


def _varying(seen: Sequence[_Sizes], request: Request, *, is_first: bool) -> Varying:
    """Return a name for each size that varies, and what was said of these.

    Sizes that were equal in all calls share a name. There is none where a size is not what was
    said of it.
    """
    sizes, declared = _sizes(request.leaves), request.declared
    names: dict[Hashable, str] = {}
    said_of: dict[str, DeclaredSize] = {}
    values: dict[str, int] = {}

    histories = {
        leaf: tuple(zip(*(other[leaf] or () for other in seen), strict=True))
        for leaf, shape in enumerate(sizes)
        if shape is not None
    }
    images = _images(histories)

    def name_of(leaf: int, axis: int, size: int) -> str | None:
        said = declared[leaf][axis] if leaf in declared else None
        if (
            said is not None
            and said.name is not None
            and values.setdefault(said.name, size) != size
        ):
            raise _Undeclared
        history = histories[leaf][axis]
        varies = None if said is None else said.varies
        if varies is None:
            is_channels = axis == 1 and len(histories[leaf]) == 4
            is_side = axis >= 2 and len(images.get(leaf, ())) in range(1, _IMAGE_SIZES + 1)
            varies = (is_first and not is_channels) or (len(set(history)) > 1 and not is_side)
        if size < 2 or not varies:
            return None
        # Sizes of one call are often equal by chance.
        same: Hashable = history if len(seen) > 1 else (leaf, axis)
        if said is not None and said.name is not None:
            same = said.name
        name = names.setdefault(same, f"s{len(names)}")
        if said is not None:
            said_of[name] = said.within(said_of.get(name, said))
            if not said_of[name].least <= size <= said_of[name].most:
                raise _Undeclared
        return name

    try:
        found = {
            leaf: tuple(name_of(leaf, axis, size) for axis, size in enumerate(shape))
            for leaf, shape in enumerate(sizes)
            if shape is not None
        }
    except _Undeclared:
        return Varying({})
    return Varying(
        {leaf: shape for leaf, shape in found.items() if any(shape)},
        limits={name: (s.least, s.most) for name, s in said_of.items() if s.is_limited},
        typical={name: s.typical for name, s in said_of.items() if s.typical is not None},
    )


def _images(
    histories: Mapping[int, Sequence[tuple[int, ...]]],
) -> dict[int, set[tuple[int, ...]]]:
    """Return the heights and widths that were seen of tensors that are images.

    A tensor of four axes is one unless others share one of its last two sizes, as of a mask.
    """
    others = {
        history
        for sizes in histories.values()
        if len(sizes) != 4
        for history in sizes
        if len(set(history)) > 1
    }
    return {
        leaf: set(zip(*sizes[2:], strict=True))
        for leaf, sizes in histories.items()
        if len(sizes) == 4
        and all(len(set(history)) > 1 and history not in others for history in sizes[2:])
    }


class _Undeclared(Exception):
    """A size is not what was said of it."""


def _said(request: Request) -> Hashable:
    return tuple(sorted(request.declared.items(), key=lambda item: item[0]))


def _may_vary(varying: Varying, request: Request) -> bool:
    """Whether no symbol stands for a size that is said to be none."""
    return not any(
        name is not None and said is not None and said.varies is False
        for leaf, names in varying.axes.items()
        for name, said in zip(names, request.declared.get(leaf, ()), strict=False)
    )


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
