"""Which sizes of calls become symbols: those that vary, or are declared to vary."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from tvmify.capture import STATIC, Limits, Symbols, TensorSizes, Varying, sizes_of
from tvmify.dispatch.request import Request
from tvmify.torch_compat.declared_sizes import DeclaredSize

#: How many sizes of images get their own programs before their heights and widths become symbols:
#: a program for one size is faster (docs/measurements/shapes.md).
_IMAGE_SIZES = 4


def varying_of(seen: Sequence[TensorSizes], request: Request, *, is_first: bool) -> Varying:
    """Return a symbol for each size that varies, with its declared limits.

    Sizes that were equal in all calls share a symbol. There are none if a size contradicts its
    declaration.
    """
    symbols = _SymbolsOfCall(seen, request, is_first=is_first)
    try:
        axes = symbols.axes()
    except _Undeclared:
        return STATIC
    limits = symbols.limits
    return Varying(
        {leaf: shape for leaf, shape in axes.items() if any(shape)},
        limits={name: Limits(s.least, s.most) for name, s in limits.items() if s.is_limited},
        typical={name: s.typical for name, s in limits.items() if s.typical is not None},
    )


class _Undeclared(Exception):
    """A size contradicts its declaration."""


class _SymbolsOfCall:
    """Names the sizes of a call that vary.

    Parameters
    ----------
    seen, request, is_first
        As for `varying_of`.

    Attributes
    ----------
    limits
        The declared limits of each symbol, by name; filled by `axes`.
    """

    def __init__(self, seen: Sequence[TensorSizes], request: Request, *, is_first: bool) -> None:
        self._sizes, self._declared = sizes_of(request.leaves), request.declared
        self._is_first, self._is_single = is_first, len(seen) == 1
        self._histories = {
            leaf: tuple(zip(*(other[leaf] or () for other in seen), strict=True))
            for leaf, shape in enumerate(self._sizes)
            if shape is not None
        }
        self._images = _images(self._histories)
        self._names: dict[Hashable, str] = {}
        self._declared_values: dict[str, int] = {}
        self.limits: dict[str, DeclaredSize] = {}

    def axes(self) -> Symbols:
        """Return the name of a symbol, or None, for each axis.

        Raises
        ------
        _Undeclared
            A size contradicts its declaration.
        """
        return {
            leaf: tuple(self._name(leaf, axis, size) for axis, size in enumerate(shape))
            for leaf, shape in enumerate(self._sizes)
            if shape is not None
        }

    def _name(self, leaf: int, axis: int, size: int) -> str | None:
        declaration = self._declared[leaf][axis] if leaf in self._declared else None
        declared_name = None if declaration is None else declaration.name
        if declared_name and self._declared_values.setdefault(declared_name, size) != size:
            raise _Undeclared
        if size < 2 or not self._varies(leaf, axis, declaration):
            return None
        # In a single call, sizes are often equal by chance.
        same = (leaf, axis) if self._is_single else self._histories[leaf][axis]
        name = self._names.setdefault(declared_name or same, f"s{len(self._names)}")
        if declaration is not None:
            limits = declaration.within(self.limits.get(name, declaration))
            if not limits.least <= size <= limits.most:
                raise _Undeclared
            self.limits[name] = limits
        return name

    def _varies(self, leaf: int, axis: int, declaration: DeclaredSize | None) -> bool:
        if declaration is not None and declaration.varies is not None:
            return declaration.varies
        histories = self._histories[leaf]
        if self._is_first and not (axis == 1 and len(histories) in (4, 5)):  # channels
            return True
        is_side = axis >= 2 and len(self._images.get(leaf, ())) in range(1, _IMAGE_SIZES + 1)
        return len(set(histories[axis])) > 1 and not is_side


def _images(
    histories: Mapping[int, Sequence[tuple[int, ...]]],
) -> dict[int, set[tuple[int, ...]]]:
    """Return the heights and widths of images in all calls, by leaf.

    A 4-d tensor is an image if its last two sizes vary, and no tensor of another kind shares one of
    them, as the inputs of a model do with their mask.
    """
    varying = {
        leaf: [history for history in sizes if len(set(history)) > 1]
        for leaf, sizes in histories.items()
    }
    sides = {
        leaf: sizes[2:]
        for leaf, sizes in histories.items()
        if len(sizes) == 4 and all(history in varying[leaf] for history in sizes[2:])
    }
    others = {history for leaf in varying.keys() - sides.keys() for history in varying[leaf]}
    return {
        leaf: set(zip(*pair, strict=True))
        for leaf, pair in sides.items()
        if others.isdisjoint(pair)
    }


def may_vary(varying: Varying, request: Request) -> bool:
    """Whether none of the symbols is a size that is declared static."""
    return not any(
        name is not None and declaration is not None and declaration.varies is False
        for leaf, names in varying.axes.items()
        for name, declaration in zip(names, request.declared.get(leaf, ()), strict=False)
    )


def from_two(known: Symbols, sizes: TensorSizes) -> Symbols:
    """Return the known symbols without those for sizes 0 and 1, which are always constants."""
    shapes = {leaf: sizes[leaf] or () for leaf in known}
    # ints have sizes where they are recorded as such
    named = {leaf: names for leaf, names in known.items() if len(names) == len(shapes[leaf])}
    small = {
        name
        for leaf, names in named.items()
        for name, size in zip(names, shapes[leaf], strict=True)
        if size < 2
    }
    found = {leaf: tuple(None if n in small else n for n in names) for leaf, names in named.items()}
    return {leaf: names for leaf, names in found.items() if any(names)}


def joined(known: Symbols, seen: Sequence[TensorSizes]) -> Symbols:
    """Return the known symbols, with one name for equal axes that were equal in all calls.

    They are the tokens of a sequence and their mask. If they differ later, that call has another
    program.
    """
    same: dict[Hashable, str] = {}
    leads: dict[str, str] = {}
    for leaf, names in known.items():
        for axis, name in enumerate(names):
            if name is not None and name not in leads:
                history = tuple((sizes[leaf] or ())[axis] for sizes in seen)
                leads[name] = same.setdefault((axis, history), name)
    return {leaf: tuple(n and leads[n] for n in names) for leaf, names in known.items()}


def cache_lengths(known: Symbols, sizes: TensorSizes) -> set[str]:
    """Return the symbols that are lengths of a cache of keys and values, or of masks for it.

    A cache is several tensors of four axes, of which only the third varies, or also the first.
    """
    lengths = _masked_keys(known)
    caches = {
        leaf: names[2]
        for leaf, names in known.items()
        if len(names) == 4 and names[2] is not None and names[1] is names[3] is None
    }
    if len(caches) > 1:
        lengths.update(caches.values())
        shapes = {leaf: tuple(sizes[leaf] or ()) for leaf in known}
        lengths |= _longer_than(max(shapes[leaf][2] for leaf in caches), known, shapes)
    return lengths


def _masked_keys(known: Symbols) -> set[str]:
    """Return the last size of each mask of four axes: the number of keys.

    The third is the number of new tokens, which other arguments have, too.
    """
    of_four = [names for names in known.values() if len(names) == 4]
    others = [names for names in known.values() if len(names) != 4]
    elsewhere = {name for names in others for name in names if name is not None}
    return {
        keys
        for _, _, queries, keys in of_four
        if queries in elsewhere and keys is not None and keys not in elsewhere
    }


def _longer_than(length: int, known: Symbols, shapes: Mapping[int, tuple[int, ...]]) -> set[str]:
    """Return the symbols that are longer than a cache, by the new tokens: those of its masks."""
    return {
        name
        for leaf, names in known.items()
        for name, size in zip(names[1:], shapes[leaf][1:], strict=True)
        if name is not None and size > length
    }
