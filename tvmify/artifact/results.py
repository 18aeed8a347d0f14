"""The kinds of leaves that a result can have; no other file knows them.

A program computes an ordered list of tensors. A leaf of the result of ``forward`` is one of these,
an argument of the call, a tensor of the module, a view of one of those three, an earlier leaf
repeated, a constant, or a number that is computed from the sizes of the arguments.

In JSON each is a list of its kind and its fields: ``["computed", 0]``, or
``["view", ["argument", 1], [2, "s0"], ["s0", 1], 0]``. Native code reads the same lists
(``native/python/results.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tvmify.artifact.expressions import (
    Size,
    check_size,
    expect,
    size_from_json,
    symbols_of,
    to_json,
    value_of,
)
from tvmify.artifact.geometry import Geometry, check_indices

_SCALARS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Sources:
    """The tensors and values from which the leaves of one result are taken.

    Attributes
    ----------
    computed
        The tensors that the program returned.
    arguments
        The leaves of the arguments.
    state
        The tensors that ``Artifact.state`` names.
    earlier
        The leaves of the result so far.
    view
        Makes a view of a tensor.
    size
        Makes a number of sizes.
    """

    computed: Sequence[Any]
    arguments: Sequence[Any]
    state: Sequence[Any]
    earlier: Sequence[Any]
    view: Callable[[View, Any], Any]
    size: Callable[[ComputedSize], Any]


@dataclass(frozen=True)
class Result:
    """Where one leaf of a result comes from; see the subclasses.

    Raises
    ------
    ValueError
        A field has an invalid value.
    """

    kind: ClassVar[str]

    @property
    def computed(self) -> int | None:
        """Index of the computed tensor that this is, or is a view of; None if there is none."""
        return None

    @property
    def argument(self) -> int | None:
        """Index of the argument leaf that this is, or is a view of; None if there is none."""
        return None

    def symbols(self) -> set[str]:
        """Return the names of the symbols in it."""
        return set()

    def take(self, sources: Sources) -> Any:
        """Return the leaf."""
        raise NotImplementedError

    def is_tensor(self, arguments: Sequence[bool], earlier: Sequence[bool]) -> bool:
        """Whether the leaf is a tensor.

        Parameters
        ----------
        arguments, earlier
            Whether the leaves of the arguments, and those of the result so far, are tensors.
        """
        return True

    def within(self, whole: Any) -> Any:
        """Return the leaf, given that tensor or the base of the view."""
        return whole

    def check(self, position: int, states: int) -> None:
        """Check its indices, given its position among the leaves and the number of state tensors.

        Raises
        ------
        ValueError
            It refers to something that does not exist.
        """

    def to_json(self) -> list[Any]:
        """Return values that JSON can hold."""
        return [self.kind, *vars(self).values()]

    @classmethod
    def from_fields(cls, *fields: Any) -> Result:
        """Make one of the values after its kind in JSON."""
        return cls(*fields)

    @staticmethod
    def from_json(value: Any) -> Result:
        """Read what `to_json` returned; it may come from anywhere.

        Raises
        ------
        TypeError, ValueError
            It does not describe a result.
        """
        match value:
            case [str(kind), *fields] if kind in _KINDS:
                return _KINDS[kind].from_fields(*fields)
        raise ValueError(f"{value!r:.100} is not a result")


@dataclass(frozen=True)
class Computed(Result):
    """The ``index``-th tensor that the program returns, in memory of its own."""

    kind: ClassVar[str] = "computed"
    index: int

    def __post_init__(self) -> None:
        check_indices(self.index)

    @property
    def computed(self) -> int:
        """Its index."""
        return self.index

    def take(self, sources: Sources) -> Any:
        """Return the tensor."""
        return sources.computed[self.index]


@dataclass(frozen=True)
class Argument(Result):
    """The ``leaf``-th leaf of the arguments, the same object; not always a tensor."""

    kind: ClassVar[str] = "argument"
    leaf: int

    def __post_init__(self) -> None:
        check_indices(self.leaf)

    def __str__(self) -> str:
        return f"leaf {self.leaf} of the arguments"

    @property
    def argument(self) -> int:
        """Its index."""
        return self.leaf

    def take(self, sources: Sources) -> Any:
        """Return the caller's own object."""
        return sources.arguments[self.leaf]

    def is_tensor(self, arguments: Sequence[bool], earlier: Sequence[bool]) -> bool:
        """Whether the caller's object is a tensor."""
        return arguments[self.leaf]


@dataclass(frozen=True)
class StateTensor(Result):
    """The tensor of the module that has the ``index``-th name in ``Artifact.state``."""

    kind: ClassVar[str] = "state"
    index: int

    def __post_init__(self) -> None:
        check_indices(self.index)

    def take(self, sources: Sources) -> Any:
        """Return the module's own tensor."""
        return sources.state[self.index]

    def check(self, position: int, states: int) -> None:
        """Refuse a tensor that has no name."""
        expect(self.index < states, f"there is no state {self.index} of {states}")


@dataclass(frozen=True)
class Repeated(Result):
    """The same object as the ``result``-th leaf, which comes earlier."""

    kind: ClassVar[str] = "repeated"
    result: int

    def __post_init__(self) -> None:
        check_indices(self.result)

    def take(self, sources: Sources) -> Any:
        """Return the earlier leaf."""
        return sources.earlier[self.result]

    def is_tensor(self, arguments: Sequence[bool], earlier: Sequence[bool]) -> bool:
        """Whether the earlier leaf is a tensor."""
        return earlier[self.result]

    def check(self, position: int, states: int) -> None:
        """Refuse a leaf that comes later."""
        expect(self.result < position, f"leaf {position} repeats leaf {self.result}")


@dataclass(frozen=True)
class Constant(Result):
    """A number, a text or None: the same in every call."""

    kind: ClassVar[str] = "constant"
    value: bool | int | float | str | None

    def __post_init__(self) -> None:
        expect(type(self.value) in _SCALARS, f"{self.value!r:.50} is not a constant")

    def take(self, sources: Sources) -> Any:
        """Return the value."""
        return self.value

    def is_tensor(self, arguments: Sequence[bool], earlier: Sequence[bool]) -> bool:
        """No."""
        return False


@dataclass(frozen=True)
class ComputedSize(Result):
    """A number over the symbols of ``Artifact.shapes``."""

    kind: ClassVar[str] = "size"
    value: Size

    def __post_init__(self) -> None:
        check_size(self.value)

    def symbols(self) -> set[str]:
        """Return the names of the symbols in it."""
        return set(symbols_of(self.value))

    def take(self, sources: Sources) -> Any:
        """Return the number."""
        return sources.size(self)

    def is_tensor(self, arguments: Sequence[bool], earlier: Sequence[bool]) -> bool:
        """No."""
        return False

    def to_json(self) -> list[Any]:
        """Return values that JSON can hold."""
        return [self.kind, to_json(self.value)]

    @classmethod
    def from_fields(cls, value: Any) -> ComputedSize:
        """Make one of the value after its kind in JSON."""
        return cls(size_from_json(value))


@dataclass(frozen=True)
class View(Result):
    """A view of a tensor of one of the first three kinds."""

    kind: ClassVar[str] = "view"
    base: Computed | Argument | StateTensor
    geometry: Geometry

    def __post_init__(self) -> None:
        is_base = isinstance(self.base, (Computed, Argument, StateTensor))
        expect(is_base, f"a view of {self.base!r:.50}")

    @property
    def computed(self) -> int | None:
        """The index of its base, if that is computed."""
        return self.base.computed

    @property
    def argument(self) -> int | None:
        """The index of its base, if that is an argument."""
        return self.base.argument

    def symbols(self) -> set[str]:
        """Return the names of the symbols in its geometry."""
        return self.geometry.symbols()

    def take(self, sources: Sources) -> Any:
        """Return a new view, which shares the memory of its base."""
        return sources.view(self, self.base.take(sources))

    def within(self, whole: Any) -> Any:
        """Return a new view of a tensor."""
        return self.geometry.of(whole)

    def check(self, position: int, states: int) -> None:
        """Refuse a base that is not there."""
        self.base.check(position, states)

    def to_json(self) -> list[Any]:
        """Return values that JSON can hold."""
        shape = self.geometry
        sizes, strides = ([*map(to_json, numbers)] for numbers in (shape.sizes, shape.strides))
        return [self.kind, self.base.to_json(), sizes, strides, to_json(shape.offset)]

    @classmethod
    def from_fields(cls, base: Any, sizes: Any, strides: Any, offset: Any) -> View:
        """Make one of the values after its kind in JSON."""
        lists = isinstance(sizes, (list, tuple)) and isinstance(strides, (list, tuple))
        expect(lists, "a view has lists of sizes and strides")
        sizes, strides = (tuple(map(size_from_json, numbers)) for numbers in (sizes, strides))
        return cls(Result.from_json(base), Geometry(sizes, strides, size_from_json(offset)))  # type: ignore[arg-type]  # checked


_KINDS: dict[str, type[Result]] = {
    cls.kind: cls
    for cls in (Computed, Argument, StateTensor, Repeated, Constant, ComputedSize, View)
}


def materialize(
    results: Iterable[Result],
    computed: Sequence[Any],
    arguments: Sequence[Any],
    state: Sequence[Any] = (),
    view: Callable[[View, Any], Any] = View.within,
    size: Callable[[ComputedSize], Any] = lambda result: value_of(result.value, {}),
) -> list[Any]:
    """Return the leaves of a result.

    An argument, a tensor of the module and a repeated leaf are the objects themselves; views share
    the memory of their bases.

    Parameters
    ----------
    results
        What the leaves are.
    computed, arguments, state, view, size
        See `Sources`. They need not be tensors: placeholders work as well, if ``view`` can make
        views of them.
    """
    leaves: list[Any] = []
    sources = Sources(computed, arguments, state, leaves, view, size)
    for result in results:
        leaves.append(result.take(sources))
    return leaves


def tensors_among(results: Iterable[Result], arguments: Sequence[bool]) -> list[bool]:
    """Return which leaves of a result are tensors, given which leaves of the arguments are."""
    found: list[bool] = []
    for result in results:
        found.append(result.is_tensor(arguments, found))
    return found


def computed_count(results: Iterable[Result]) -> int:
    """Return how many tensors a program must compute for these results."""
    return max((r.computed + 1 for r in results if r.computed is not None), default=0)


def hidden(results: Sequence[Result]) -> set[int]:
    """Return the computed tensors that occur in a result only through views."""
    whole = {result.index for result in results if isinstance(result, Computed)}
    return {result.computed for result in results if result.computed is not None} - whole
